# SPDX-License-Identifier: Apache-2.0
"""Data loaders draw rows, epoch after epoch. The order depends only on (seed, epoch); the state is two integers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from whet.config.schema import TrainerConfig
from whet.errors import DataError
from whet.keyed import key
from whet.types import Group, Prompt

log = logging.getLogger(__name__)
RowNumbers: TypeAlias = NDArray[np.int64]  # row numbers
T = TypeVar("T")
RESTORE = (
    "restore the data files, data.filter or data.max_prompt_length, which changed since, or set trainer.resume=never"
)
Order: TypeAlias = Callable[[int], RowNumbers]  # from an epoch to its row numbers


def generator(seed: int, purpose: str, *names: int | str) -> np.random.Generator:
    """Makes the random generator whose key is (seed, purpose, names): the same key gives the same numbers."""
    return np.random.Generator(np.random.PCG64(key(seed, purpose, *names)))


def in_order(count: int, epoch: int) -> RowNumbers:
    """Returns the row numbers in the order of the data."""
    return np.arange(count)


def shuffled(count: int, seed: int, epoch: int, *names: int | str) -> RowNumbers:
    """Returns the row numbers in a random order, which depends only on (seed, epoch, names)."""
    return generator(seed, "shuffle", epoch, *names).permutation(count)


def mixture(orders: Sequence[Order], counts: Sequence[int], weights: Sequence[float], seed: int) -> Order:
    """Mixes several data entries by weight.

    An epoch has as many rows as all entries together. Of these, each entry gets its weight times the total (rounded).
    Rows of all entries are interleaved in a random order. Each entry has its own order and repeats it, independent of
    epochs: a small entry with a large weight is drawn several times in an epoch, a large entry with a small weight only
    in part. Each of `orders` has every row of its entry once; `weights` sum to 1. Raises: DataError for a weight so
    small that no row is drawn."""
    total = sum(counts)
    drawn = _rounded(weights, total)
    if 0 in drawn:
        least = drawn.index(0)
        found = f"entry {least} of train_files has a weight of {weights[least]:.2g}, no row in an epoch of {total}"
        raise DataError("data.weights", found, "at least one row", "raise the weight, or remove the entry")
    first = np.cumsum([0, *counts])

    def order(epoch: int) -> RowNumbers:
        turns = np.repeat(np.arange(len(counts)), drawn)
        turns = turns[generator(seed, "mixture", epoch).permutation(total)]
        rows = np.empty(total, dtype=np.int64)
        for source, each in enumerate(orders):
            own = _passes(each, counts[source], epoch * drawn[source], drawn[source])
            rows[turns == source] = first[source] + own
        return rows

    return order


def run_steps(trainer: TrainerConfig, count: int, rows_per_step: int) -> int:
    """The number of steps of a run on `count` rows."""
    steps_per_epoch = max(1, count // rows_per_step)  # whole ones; the remaining rows belong to the next epoch
    return trainer.total_steps or trainer.total_epochs * steps_per_epoch


class OrderLoader(Generic[T]):
    """Draws items (prompts or examples), epoch after epoch, in the order of each epoch."""

    def __init__(self, items: Sequence[T], *, seed: int = 0, shuffle: bool = True, order: Order | None = None) -> None:
        count = len(items)
        if count < 1:
            raise DataError("number of rows", 0, "at least 1")
        self.items = items
        self._is_own = order is not None
        self._order_of = order or (partial(shuffled, count, seed) if shuffle else partial(in_order, count))
        self._start(epoch=0, index=0)

    def take(self, n: int) -> list[T]:
        """Draws the next n items; after the end of an epoch, continues with the next epoch."""
        return [item for _, item in self.take_named(n)]

    def take_named(self, n: int) -> list[tuple[str, T]]:
        """Draws the next n items, each with a unique name: its epoch and, if it is repeated in the epoch, a count."""
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
        """The position of the next `take`: `epoch`, and `index` in the order of this epoch."""
        return {"epoch": self._epoch, "index": self._index}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a position that `state` returned.  Raises: DataError if it does not exist in these rows."""
        self._start(state["epoch"], state["index"])
        if not 0 <= self._index < len(self._order):
            found = f"its position is row {self._index} of an epoch of {len(self._order)} rows"
            raise DataError("checkpoint", found, "", RESTORE)

    def _start(self, epoch: int, index: int) -> None:
        self._epoch, self._index = epoch, index
        self._order = self._order_of(epoch)
        self._times = _times_before(self._order) if self._is_own else np.zeros(len(self.items), dtype=np.int64)


class PromptSource:
    """A source of prompts: returns prompts that were put back, then prompts that a subclass draws."""

    def __init__(self, prompts: Sequence[Prompt] = (), *, first: Sequence[Prompt] = ()) -> None:
        """`prompts` are all that can be drawn; `first` are to be taken before."""
        self.prompts, self._first = prompts, list(first)

    def take(self, n: int) -> list[Prompt]:
        """Returns the next n prompts."""
        first, self._first = self._first[:n], self._first[n:]
        return [*first, *(self.draw(n - len(first)) if n > len(first) else ())]

    def draw(self, n: int) -> list[Prompt]:
        """Draws n new prompts.  Raises: DataError if there are none."""
        raise DataError("source of prompts", None, "prompts to sample", "pass a loader to Rollouts, or call sample")

    def put_back(self, uids: Sequence[str]) -> None:
        """Puts prompts back so that they come first, and logs this.  Raises: DataError for a uid not in the data."""
        if uids:
            log.warning("%d prompts that were sampled ahead start again; they are the next to be sampled", len(uids))
        self._first = [*map(self.find, uids), *self._first]

    def find(self, uid: str) -> Prompt:
        """Finds the prompt whose row number is at the end of `uid`, and gives it this uid.  Raises: DataError."""
        index = uid.rpartition(":")[2]
        for prompt in self.prompts:
            if str(prompt.index) == index:
                return replace(prompt, uid=uid)
        problem = f"has responses to row {index}, which is not among the {len(self.prompts)} prompts"
        raise DataError("checkpoint", problem, "", RESTORE)

    def observe(self, groups: Sequence[Group]) -> None:
        """Receives all scored groups, also groups that a filter drops. A fixed order does not depend on them."""

    def state(self) -> dict[str, Any]:
        """Returns the position of the next `take`. Key `first` has the uids of prompts that were put back, if any."""
        return {**self.position(), **({"first": [each.uid for each in self._first]} if self._first else {})}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a position.  Raises: DataError for the position of another source."""
        self.move_to(state)
        self._first = [self.find(uid) for uid in state.get("first", ())]

    def position(self) -> dict[str, Any]:
        """Returns the position of the next `draw`."""
        return {}

    def move_to(self, state: Mapping[str, Any]) -> None:
        """Continues to draw from a position."""


class PromptLoader(PromptSource):
    """Draws the prompts of a run. Each has the `uid` "<epoch>:<index in the data set>"."""

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int = 0, shuffle: bool = True, order: Order | None = None
    ) -> None:
        super().__init__(prompts)
        self._rows = OrderLoader(prompts, seed=seed, shuffle=shuffle, order=order)

    def draw(self, n: int) -> list[Prompt]:
        """Draws the next n prompts; after the end of an epoch, continues with the next epoch."""
        return [replace(prompt, uid=f"{name}:{prompt.index}") for name, prompt in self._rows.take_named(n)]

    def position(self) -> dict[str, Any]:
        return self._rows.state()

    def move_to(self, state: Mapping[str, Any]) -> None:
        self._rows.load_state(state)


@runtime_checkable
class Sampler(Protocol):
    """An adaptive sampler. The scores of earlier prompts influence the next ones."""

    def take(self, n: int) -> Sequence[int]:
        """Returns the row numbers of the next n prompts. Random draws must use keys (`whet.keyed`) from the state."""

    def observe(self, groups: Sequence[Group]) -> None:
        """Reads the scores of groups, including groups that a filter drops. `group.prompt.index` is the row number."""

    def state(self) -> Mapping[str, Any]:
        """Returns the whole state as JSON values, for the checkpoint."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state."""


class SamplerLoader(PromptSource):
    """Draws the prompts that a `Sampler` chooses. Each has the `uid` "<number of the draw>:<row number>"."""

    def __init__(self, prompts: Sequence[Prompt], sampler: Sampler, name: str) -> None:
        super().__init__(prompts)
        self.sampler, self._name, self._drawn = sampler, name, 0

    def draw(self, n: int) -> list[Prompt]:
        """Draws the next n prompts.  Raises: DataError if the sampler does not return n row numbers."""
        rows = checked_rows(self.sampler.take(n), len(self.prompts), self._name).tolist()
        if len(rows) != n:
            raise DataError(f"{self._name}: take({n})", f"returned {len(rows)} row numbers", str(n))
        self._drawn += n
        chosen = [self.prompts[row] for row in rows]
        return [replace(p, uid=f"{draw}:{p.index}") for draw, p in enumerate(chosen, self._drawn - n)]

    def observe(self, groups: Sequence[Group]) -> None:
        self.sampler.observe(groups)

    def position(self) -> dict[str, Any]:
        """The number of draws, and the state of the sampler."""
        return {"drawn": self._drawn, "sampler": dict(self.sampler.state())}

    def move_to(self, state: Mapping[str, Any]) -> None:
        if "sampler" not in state:
            found = f"has no state of {self._name}"
            raise DataError("checkpoint", found, "", "restore data.sampler, which changed since")
        self._drawn = state["drawn"]
        self.sampler.load_state(state["sampler"])


def checked_rows(given: object, count: int, name: str) -> RowNumbers:
    """Checks the row numbers that a user's sampler returned.  Raises: DataError."""
    rows = np.asarray(given)
    if rows.ndim != 1 or not len(rows) or not np.issubdtype(rows.dtype, np.integer):
        raise DataError(name, f"returned {str(given)[:80]} ({type(given).__name__})", "row numbers")
    if rows.min() < 0 or rows.max() >= count:
        wrong = next(row for row in rows.tolist() if not 0 <= row < count)
        raise DataError(name, f"returned row {wrong} of {count} prompts", f"0 to {count - 1}")
    return rows.astype(np.int64)


def _passes(order: Order, count: int, first: int, n: int) -> RowNumbers:
    """Returns draws number `first` to `first` + n - 1 of an entry of `count` rows. Its order is repeated endlessly."""
    rows = [order(number) for number in range(first // count, (first + n - 1) // count + 1)]
    return np.concatenate(rows)[first % count :][:n]


def _rounded(weights: Sequence[float], total: int) -> list[int]:
    """Rounds weight x total to whole numbers with sum `total`, by largest remainders."""
    exact = [weight * total for weight in weights]
    whole = [int(each) for each in exact]
    by_remainder = sorted(range(len(whole)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole


def _times_before(rows: RowNumbers) -> RowNumbers:
    """Counts the earlier occurrences of each row: [3, 5, 3, 3] -> [0, 0, 1, 2]."""
    places = np.argsort(rows, kind="stable")
    ordered, counting = rows[places], np.arange(len(rows))
    starts = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    times = np.empty(len(rows), dtype=np.int64)
    times[places] = counting - np.maximum.accumulate(np.where(starts, counting, 0))
    return times
