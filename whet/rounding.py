# SPDX-License-Identifier: Apache-2.0
"""Equality of scores up to rounding: 0.1 + 0.2 + 0.3 equals 0.3 + 0.2 + 0.1, also in float32.

A group of equal scores gives no signal. Imports no torch: score functions and filters use it."""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose

# Relative: four units in the last place of a float32. Absolute: the rounding error when parts of size 1 cancel.
RELATIVE, ABSOLUTE = 5e-7, 1e-7


def alike(one: float, other: float) -> bool:
    """Tells whether two scores are equal up to rounding."""
    return isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def all_alike(values: Sequence[float]) -> bool:
    """Tells whether the values of a group are equal up to rounding; true for fewer than two values."""
    return not values or alike(min(values), max(values))


def reaches(value: float, threshold: float) -> bool:
    """Tells whether value >= threshold, up to rounding."""
    return value >= threshold or alike(value, threshold)
