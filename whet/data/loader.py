# SPDX-License-Identifier: Apache-2.0
"""The order in which a run meets its prompts: endless, shuffled anew every epoch, and resumable from two integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from whet.errors import DataError
from whet.keyed import key
from whet.types import Prompt


class OrderLoader:
    """Hands out the numbers of `count` rows in an order that (seed, epoch) decides alone; `state()` is where it is."""

    def __init__(self, count: int, *, seed: int, shuffle: bool = True) -> None:
        if count < 1:
            raise DataError("no rows to load; expected at least one")
        self.count, self.seed, self.shuffle = count, seed, shuffle
        self._start(epoch=0, index=0)

    def take(self, n: int) -> list[int]:
        """The next n row numbers, over epoch ends if need be."""
        return [row for _, row in self.take_with_epoch(n)]

    def take_with_epoch(self, n: int) -> list[tuple[int, int]]:
        """The next n pairs of epoch and row number."""
        taken: list[tuple[int, int]] = []
        while len(taken) < n:
            rows = self._order[self._index : self._index + n - len(taken)].tolist()
            taken += [(self._epoch, row) for row in rows]
            self._index += len(rows)
            if self._index == self.count:
                self._start(self._epoch + 1, index=0)
        return taken

    def state(self) -> dict[str, int]:
        """Where the next `take` starts: `epoch`, and `index` in the order of that epoch."""
        return {"epoch": self._epoch, "index": self._index}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Goes on where `state()` was taken. Raises: DataError if these rows cannot be the ones it was taken on."""
        if not 0 <= state["index"] < self.count:
            raise DataError(
                f"the saved position is row {state['index']} of an epoch of {self.count} rows; "
                "the data files or data.max_prompt_length changed since: restore them, or set trainer.resume=never"
            )
        self._start(state["epoch"], state["index"])

    def _start(self, epoch: int, index: int) -> None:
        self._epoch, self._index = epoch, index
        self._order = np.arange(self.count)
        if self.shuffle:
            bits = np.random.PCG64(key(self.seed, "shuffle", epoch))
            self._order = np.random.Generator(bits).permutation(self.count)


class PromptLoader:
    """The prompts of a run, in the order of an `OrderLoader`."""

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True) -> None:
        self.prompts = prompts
        self._order = OrderLoader(len(prompts), seed=seed, shuffle=shuffle)

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts, over epoch ends if need be, each with its `uid` "<epoch>:<index in the data set>"."""
        taken = [(epoch, self.prompts[row]) for epoch, row in self._order.take_with_epoch(n)]
        return [replace(prompt, uid=f"{epoch}:{prompt.index}") for epoch, prompt in taken]

    def state(self) -> dict[str, int]:
        """Where the next `take` starts: `epoch`, and `index` in the order of that epoch."""
        return self._order.state()

    def load_state(self, state: Mapping[str, int]) -> None:
        """Goes on where `state()` was taken. Raises: DataError if these prompts cannot be the ones it was taken on."""
        self._order.load_state(state)

    def steps_per_epoch(self, prompts_per_step: int) -> int:
        """Whole steps in one pass over the data (the rest opens the next epoch); at least one."""
        return max(1, len(self.prompts) // prompts_per_step)
