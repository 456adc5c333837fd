# SPDX-License-Identifier: Apache-2.0
"""The order in which a run meets its rows: endless, a function of (seed, epoch), and resumable from two integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from whet.errors import DataError
from whet.keyed import key
from whet.types import Group, Prompt

Rows: TypeAlias = NDArray[np.int64]  # row numbers
T = TypeVar("T")
Order: TypeAlias = Callable[[int], Rows]  # of an epoch


def generator(seed: int, purpose: str, *names: int | str) -> np.random.Generator:
    """The draws of that name."""
    return np.random.Generator(np.random.PCG64(key(seed, purpose, *names)))


def in_order(count: int, epoch: int) -> Rows:
    """Rows as they come."""
    return np.arange(count)


def shuffled(count: int, seed: int, epoch: int, *names: int | str) -> Rows:
    """Rows in the order that (seed, epoch, names) decide."""
    return generator(seed, "shuffle", epoch, *names).permutation(count)


def mixture(orders: Sequence[Order], counts: Sequence[int], weights: Sequence[float], seed: int) -> Order:
    """Several sources as one, each with its share of what is drawn.

    An epoch has as many rows as all sources together, and of them exactly its share (rounded) from each source, in
    turns that (seed, epoch) decide. A source goes through its own order, whose passes go on over epoch ends: a small
    one with a large weight is met several times an epoch, a large one with a small weight in part. `orders` give every
    row of their source once a pass; `weights` sum to 1.  Raises: DataError for a weight too small to be drawn.
    """
    total = sum(counts)
    drawn = _rounded(weights, total)
    if 0 in drawn:
        least = drawn.index(0)
        raise DataError(
            f"data.weights gives entry {least} of train_files a share of {weights[least]:.2g}, no row of an epoch of "
            f"{total}; raise it, or take the entry out"
        )
    first = np.cumsum([0, *counts])

    def order(epoch: int) -> Rows:
        turns = np.repeat(np.arange(len(counts)), drawn)
        turns = turns[generator(seed, "mixture", epoch).permutation(total)]
        rows = np.empty(total, dtype=np.int64)
        for source, each in enumerate(orders):
            own = _passes(each, counts[source], epoch * drawn[source], drawn[source])
            rows[turns == source] = first[source] + own
        return rows

    return order


def steps_per_epoch(count: int, rows_per_step: int) -> int:
    """Whole steps in one pass over the data (the rest opens the next epoch); at least one."""
    return max(1, count // rows_per_step)


class OrderLoader(Generic[T]):
    """Hands out items, each epoch in its order; `state()` is where it is."""

    def __init__(self, items: Sequence[T], *, seed: int = 0, shuffle: bool = True, order: Order | None = None) -> None:
        count = len(items)
        if count < 1:
            raise DataError("no rows to load; expected at least one")
        self.items = items
        self._is_own = order is not None
        self._order_of = order or (partial(shuffled, count, seed) if shuffle else partial(in_order, count))
        self._start(epoch=0, index=0)

    def take(self, n: int) -> list[T]:
        """The next n items, over epoch ends if need be."""
        return [item for _, item in self.take_named(n)]

    def take_named(self, n: int) -> list[tuple[str, T]]:
        """The next n items, each with a name that it has once only: its epoch, and from the second time that it
        comes in an epoch which time it is."""
        taken: list[tuple[str, T]] = []
        while len(taken) < n:
            part = slice(self._index, self._index + n - len(taken))
            names = [f"{self._epoch}.{times}" if times else str(self._epoch) for times in self._times[part].tolist()]
            taken += zip(names, (self.items[row] for row in self._order[part].tolist()), strict=True)
            self._index += len(names)
            if self._index == len(self._order):
                self._start(self._epoch + 1, index=0)
        return taken

    def state(self) -> dict[str, Any]:
        """The place where the next `take` starts: `epoch`, and `index` in the order of that epoch."""
        return {"epoch": self._epoch, "index": self._index}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state()` was taken. Raises: DataError if these rows cannot be the ones it was taken on."""
        self._start(state["epoch"], state["index"])
        if not 0 <= self._index < len(self._order):
            raise DataError(
                f"the saved position is row {self._index} of an epoch of {len(self._order)} rows; the data files, "
                "data.filter or data.max_prompt_length changed since: restore them, or set trainer.resume=never"
            )

    def _start(self, epoch: int, index: int) -> None:
        self._epoch, self._index = epoch, index
        self._order = self._order_of(epoch)
        self._times = _times_before(self._order) if self._is_own else np.zeros(len(self.items), dtype=np.int64)


class PromptLoader(OrderLoader[Prompt]):
    """The prompts of a run, each with its `uid` "<epoch>:<index in the data set>"."""

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts, over epoch ends if need be."""
        return [replace(prompt, uid=f"{name}:{prompt.index}") for name, prompt in self.take_named(n)]

    def observe(self, groups: Sequence[Group]) -> None:
        """An order that is settled learns nothing."""


@runtime_checkable
class Sampler(Protocol):
    """A sampler that learns: which prompts come next depends on how those before were answered."""

    def take(self, n: int) -> Sequence[int]:
        """The places of the next n prompts in the data. Draws are keyed (`whet.keyed`), by what `state` holds."""
        ...

    def observe(self, groups: Sequence[Group]) -> None:
        """Sees every scored group, those too that a filter drops; `group.prompt.index` is the row number."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Everything that it has learned, as JSON can hold it: it travels in the checkpoint."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        ...


class SamplerLoader:
    """The prompts of a run as a `Sampler` chooses them, each with its `uid` "<which draw it is>:<index>"."""

    def __init__(self, prompts: Sequence[Prompt], sampler: Sampler, name: str) -> None:
        self.prompts, self.sampler, self._name, self._drawn = prompts, sampler, name, 0

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts.  Raises: DataError where the sampler gives other than n places in the data."""
        rows = checked_rows(self.sampler.take(n), len(self.prompts), self._name).tolist() if n else []
        if len(rows) != n:
            raise DataError(f"{self._name}: take({n}) gave {len(rows)} rows; expected {n}")
        self._drawn += n
        chosen = [self.prompts[row] for row in rows]
        return [replace(p, uid=f"{draw}:{p.index}") for draw, p in enumerate(chosen, self._drawn - n)]

    def observe(self, groups: Sequence[Group]) -> None:
        """Hands on what was scored."""
        self.sampler.observe(groups)

    def state(self) -> dict[str, Any]:
        """The number of draws, and the state of the sampler."""
        return {"drawn": self._drawn, "sampler": dict(self.sampler.state())}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state()` was taken."""
        if "sampler" not in state:
            raise DataError(f"the checkpoint holds no state of {self._name}; data.sampler changed since: restore it")
        self._drawn = state["drawn"]
        self.sampler.load_state(state["sampler"])


def checked_rows(given: object, count: int, name: str) -> Rows:
    """Row numbers that a user's sampler gave.  Raises: DataError."""
    rows = np.asarray(given)
    if rows.ndim != 1 or not len(rows) or not np.issubdtype(rows.dtype, np.integer):
        raise DataError(f"{name}: expected row numbers, found {str(given)[:80]} ({type(given).__name__})")
    if rows.min() < 0 or rows.max() >= count:
        wrong = next(row for row in rows.tolist() if not 0 <= row < count)
        raise DataError(f"{name}: gave row {wrong} of {count} prompts; expected 0 to {count - 1}")
    return rows.astype(np.int64)


def _passes(order: Order, count: int, first: int, n: int) -> Rows:
    """The draws first, ..., first + n - 1 of one source that goes through its order again and again."""
    rows = [order(number) for number in range(first // count, (first + n - 1) // count + 1)]
    return np.concatenate(rows)[first % count :][:n]


def _rounded(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers that sum to `total`, as near to weight x total as can be: the largest remainders are rounded up."""
    exact = [weight * total for weight in weights]
    whole = [int(each) for each in exact]
    by_remainder = sorted(range(len(whole)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole


def _times_before(rows: Rows) -> Rows:
    """Counts for each place how often its row came before: [3, 5, 3, 3] -> [0, 0, 1, 2]."""
    places = np.argsort(rows, kind="stable")
    ordered, counting = rows[places], np.arange(len(rows))
    starts = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    times = np.empty(len(rows), dtype=np.int64)
    times[places] = counting - np.maximum.accumulate(np.where(starts, counting, 0))
    return times
