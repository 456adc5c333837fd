# SPDX-License-Identifier: Apache-2.0
"""Metrics: collects numbers by name and reduces them to one number for each step."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from whet.errors import DataError
from whet.phases import phase

Scalar = float | torch.Tensor
Reduction = Literal["mean", "sum", "max", "min", "seconds"]


class Metrics:
    """Collects numbers by name (`area/name`), each with a reduction that the caller chooses.

    `reduce` gives the same bits however the numbers are split (over micro-batches, workers) and in whatever order they
    are merged: all numbers are kept until `reduce`, and sums are exactly rounded. A value may be a 0-d tensor on any
    device: it is copied on the device, and the host reads all of them at once in `reduce`. A NaN makes the metric NaN,
    unless its weight is 0. A collector belongs to one thread, and is pickled as plain floats.

    Raises: DataError for a name with two reductions, for a value that is not one number, for a negative weight.
    """

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}

    def mean(self, name: str, value: Scalar, weight: Scalar = 1.0) -> None:
        """Records a mean: sum(weight * value) / sum(weight). Weight 0 ignores a value, so a mean over no tokens may be
        NaN.

        For a mean of means, the weight must be the number of items (tokens, rows) of each mean."""
        self._record("mean", name, value, weight)

    def sum(self, name: str, value: Scalar) -> None:
        """Records a sum of all values."""
        self._record("sum", name, value)

    def max(self, name: str, value: Scalar) -> None:
        """Records the largest value."""
        self._record("max", name, value)

    def min(self, name: str, value: Scalar) -> None:
        """Records the smallest value."""
        self._record("min", name, value)

    def seconds(self, name: str, value: float) -> None:
        """Adds `value` to the seconds under a name, which `timings` returns."""
        self._record("seconds", name, value)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Records the seconds of the block on the host's clock, even if it raises; `timings` returns them.

        Times under one name add up, also from merged collectors, so parallel blocks count twice."""
        with phase(name):
            start = time.perf_counter()
            try:
                yield
            finally:
                self.seconds(name, time.perf_counter() - start)

    def merge(self, other: Metrics, prefix: str = "") -> None:
        """Adds all numbers of `other`, with `prefix` before their names; `other` does not change."""
        for name, theirs in list(other._series.items()):
            self._named(prefix + name, theirs.reduction).numbers += theirs.numbers

    def reduce(self) -> dict[str, float]:
        """Returns the metrics by name, sorted, without timings. A mean whose weights are all 0 is left out."""
        return self._reduced(timings=False)

    def value(self, name: str) -> float | None:
        """Returns the current value of a metric; None if nothing was recorded under the name."""
        series = self._series.get(name)
        return None if series is None else _reduce(name, series.reduction, _on_host({name: series})[name])

    def timings(self) -> dict[str, float]:
        """Returns the seconds by name, sorted. `reduce` leaves them out: its numbers are equal in every repeat."""
        return self._reduced(timings=True)

    def __getstate__(self) -> dict[str, Any]:
        numbers = _on_host(self._series)
        return {"_series": {name: _Series(s.reduction, list(numbers[name])) for name, s in self._series.items()}}

    def _record(self, reduction: Reduction, name: str, value: Scalar, weight: Scalar = 1.0) -> None:
        self._named(name, reduction).numbers.append((_number(name, value), _number(name, weight)))

    def _named(self, name: str, reduction: Reduction) -> _Series:
        series = self._series.setdefault(name, _Series(reduction))
        if series.reduction != reduction:
            raise DataError(f"metric {name}", f"{series.reduction} and {reduction}", "one reduction", "rename one")
        return series

    def _reduced(self, timings: bool) -> dict[str, float]:
        chosen = {name: series for name, series in self._series.items() if (series.reduction == "seconds") == timings}
        numbers = _on_host(chosen)
        results = ((name, _reduce(name, chosen[name].reduction, numbers[name])) for name in sorted(chosen))
        return {name: result for name, result in results if result is not None}


@dataclass
class _Series:
    """The numbers under one name, as pairs (value, weight)."""

    reduction: Reduction
    numbers: list[tuple[Scalar, Scalar]] = field(default_factory=list)


def _number(name: str, value: Scalar) -> Scalar:
    if isinstance(value, torch.Tensor):
        if value.ndim:
            raise DataError(f"metric {name}", f"tensor of shape {list(value.shape)}", "one number", "reduce it")
        return value.detach().clone()  # a copy without graph or larger storage; later writes do not change it
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"metric {name}", repr(value), "a number or a 0-d tensor") from error


def _on_host(series: dict[str, _Series]) -> dict[str, list[tuple[float, float]]]:
    """Returns the numbers of each series as floats. All tensors of a device and dtype are transferred at once."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for one in series.values():
        for number in itertools.chain.from_iterable(one.numbers):
            if isinstance(number, torch.Tensor):
                alike.setdefault((number.device, number.dtype), []).append(number)
    floats: dict[int, float] = {}
    for tensors in alike.values():
        floats.update(zip(map(id, tensors), map(float, torch.stack(tensors).tolist()), strict=True))

    def read(number: Scalar) -> float:
        return floats[id(number)] if isinstance(number, torch.Tensor) else number

    return {name: [(read(value), read(weight)) for value, weight in one.numbers] for name, one in series.items()}


def _reduce(name: str, reduction: Reduction, numbers: list[tuple[float, float]]) -> float | None:
    values = [value for value, _ in numbers]
    if reduction == "mean":
        return _mean(name, numbers)
    if reduction in ("sum", "seconds"):
        return _sum(values)
    if any(map(math.isnan, values)):  # Python's max and min depend on the position of a NaN
        return math.nan
    return max(values) if reduction == "max" else min(values)


def _mean(name: str, numbers: list[tuple[float, float]]) -> float | None:
    if negative := [weight for _, weight in numbers if weight < 0]:
        raise DataError(f"weight of metric {name}", negative[0], "a count or share, never below 0")
    weighed = [(value, weight) for value, weight in numbers if weight]
    if not weighed:
        return None
    mean = _sum([value * weight for value, weight in weighed]) / _sum([weight for _, weight in weighed])
    values = [value for value, _ in weighed]
    return min(max(mean, min(values)), max(values))  # in spite of rounding, the mean of equal numbers is that number


def _sum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # beyond the largest float, or inf - inf
        return sum(values)
