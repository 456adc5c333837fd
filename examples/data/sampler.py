# SPDX-License-Identifier: Apache-2.0
"""Samplers of one's own: whet train ... data.sampler=sampler.py:shortest_first, or data.sampler=sampler.py:Unsolved

A function gives the order of an epoch: row numbers, some of them more than once if so wished. A class learns from what
was scored. Before `*` they take `prompts`, `epoch` (a function only), `seed`, `total_draws`; the rest are options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from whet.data.loader import generator
from whet.types import Group, Prompt


def shortest_first(prompts: Sequence[Prompt], epoch: int, seed: int, *, epochs: int = 1) -> list[int]:
    """Short prompts before long ones for so many epochs, then in any order; the same arguments give the same order."""
    if epoch >= epochs:
        return list(generator(seed, "shortest_first", epoch).permutation(len(prompts)))
    return sorted(range(len(prompts)), key=lambda row: len(prompts[row].token_ids))


class Unsolved:
    """Prompts in turn, but those that every answer solved come again only when all of them are solved."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.waiting = list(range(len(prompts)))
        self.solved: list[int] = []
        self.places = {prompt.index: place for place, prompt in enumerate(prompts)}

    def take(self, n: int) -> list[int]:
        """The next n places; they go to the end of the queue."""
        taken = []
        for _ in range(n):
            if not self.waiting:
                self.waiting, self.solved = self.solved, []
            taken.append(self.waiting.pop(0))
            self.waiting.append(taken[-1])
        return taken

    def observe(self, groups: Sequence[Group]) -> None:
        """Puts aside what was solved."""
        for group in groups:
            place = self.places[group.prompt.index]
            if place in self.waiting and all(answer.accuracy == 1.0 for answer in group.trajectories):
                self.waiting.remove(place)
                self.solved.append(place)

    def state(self) -> dict[str, Any]:
        """What the checkpoint keeps."""
        return {"waiting": self.waiting, "solved": self.solved}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self.waiting, self.solved = list(state["waiting"]), list(state["solved"])
