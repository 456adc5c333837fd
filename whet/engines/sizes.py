# SPDX-License-Identifier: Apache-2.0
"""Checks of mesh sizes against the number of processes, for every engine with a mesh. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from whet.config.algorithm_checks import EngineUse, nearest_divisors
from whet.engines.mesh import FACTORS
from whet.errors import ConfigError


def uneven_sizes(use: EngineUse, key: str, given: Mapping[str, int]) -> Iterator[ConfigError]:
    """Divides the number of processes by one size after another.  Yields an error for the first with a remainder."""
    left, whole = use.processes, f"{use.processes_key}={use.processes}"
    for name in (each for each in FACTORS if each in given):
        if left % given[name]:
            near = " or ".join(str(each) for each in nearest_divisors(left, given[name]))
            others = [f"{each}={given[each]}" for each in FACTORS[: FACTORS.index(name)] if each in given]
            expected = f"a divisor of {whole}"
            if others:
                expected = f"a divisor of the {left} processes that {' and '.join(others)} leave of {whole}"
            yield ConfigError(f"{key}.{name}", given[name], expected, f"try {near}")
            return
        left //= given[name]


def uneven_experts(key: str, size: int, holders: int, product: str) -> Iterator[ConfigError]:
    """Yields an error if `size`, the parts of the experts, does not divide `holders`, called `product` in the error."""
    if holders % size:
        near = " or ".join(str(each) for each in nearest_divisors(holders, size))
        yield ConfigError(f"{key}.expert", size, f"a divisor of {product}", f"try {near}")
