# SPDX-License-Identifier: Apache-2.0
"""Parameters of a test of which some run with every test, and the others have a mark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def first(number: int, values: Iterable[Any], *, others: pytest.MarkDecorator) -> list[Any]:
    """Marks all parameters after the first ones. A tuple has the values of several arguments."""
    return [each if place < number else marked(each, others) for place, each in enumerate(values)]


def only(names: Iterable[str], values: Iterable[ParameterSet], *, others: pytest.MarkDecorator) -> list[ParameterSet]:
    """Marks all parameters whose ids are none of the names."""
    kept = frozenset(names)
    return [each if each.id in kept else marked(each, others) for each in values]


def marked(value: Any, mark: pytest.MarkDecorator) -> ParameterSet:
    """Adds a mark to a parameter."""
    if isinstance(value, ParameterSet):
        return pytest.param(*value.values, marks=[*value.marks, mark], id=value.id)
    return pytest.param(*(value if type(value) is tuple else (value,)), marks=mark)
