# SPDX-License-Identifier: Apache-2.0
"""Samplers of your own: whet train ... data.sampler=examples/extending/sampler.py:Unsolved, or with an option
data.sampler=examples/extending/sampler.py:shortest_first data.sampler_options.epochs=2

A function returns the order of an epoch: row numbers, which may repeat. A class adapts to the scored groups. Their
parameters before `*` are `prompts`, `epoch` (of a function only), `seed` and `total_draws`; the others are options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.data.loader import generator
from whet.types import Group, Prompt


def shortest_first(prompts: Sequence[Prompt], epoch: int, seed: int, *, epochs: int = 1) -> list[int]:
    """Short prompts before long ones in the first `epochs` epochs, then in random order, keyed by seed and epoch."""
    if epoch >= epochs:
        return list(generator(seed, "shortest_first", epoch).permutation(len(prompts)))
    return sorted(range(len(prompts)), key=lambda row: len(prompts[row].token_ids))


class Unsolved:
    """Prompts in turn. A prompt that all trajectories solved is left out until all prompts are solved."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.waiting = list(range(len(prompts)))
        self.solved: list[int] = []
        self.places = {prompt.index: place for place, prompt in enumerate(prompts)}

    def take(self, n: int) -> list[int]:
        """Returns the next n row numbers, and moves them to the end of the queue."""
        taken = []
        for _ in range(n):
            if not self.waiting:
                self.waiting, self.solved = self.solved, []
            taken.append(self.waiting.pop(0))
            self.waiting.append(taken[-1])
        return taken

    def observe(self, groups: Sequence[Group]) -> None:
        """Leaves out the prompts that were solved."""
        for group in groups:
            place = self.places[group.prompt.index]
            if place in self.waiting and all(each.accuracy == 1.0 for each in group.trajectories):
                self.waiting.remove(place)
                self.solved.append(place)

    def state(self) -> dict[str, Any]:
        """Returns the state that a checkpoint stores."""
        return {"waiting": self.waiting, "solved": self.solved}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint."""
        self.waiting, self.solved = list(state["waiting"]), list(state["solved"])
