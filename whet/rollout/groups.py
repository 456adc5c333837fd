# SPDX-License-Identifier: Apache-2.0
"""The stream of groups as a state machine: scored trajectories go in; prompts to start and groups to train on come out.

It has no clock, thread or socket, and the order in which trajectories come in changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whet.errors import DataError
from whet.types import Group, Prompt, Trajectory


@dataclass(frozen=True)
class Filter:
    """The choice of groups to train on: `keeps` reads the `metric` of a group's trajectories that did not fail."""

    keeps: Callable[..., bool]
    options: Mapping[str, Any]
    metric: str = "accuracy"
    max_refills: int = 4

    def keep(self, group: Group) -> bool:
        """Tells whether a group is trained on.  Raises: DataError for a metric that the reward does not report."""
        values = [_metric(trajectory, self.metric) for trajectory in group.trajectories if not trajectory.failure]
        return self.keeps(values, **self.options)


@dataclass(frozen=True)
class Start:
    """Take the next `count` prompts, tell `started` which, and run their episodes."""

    count: int


@dataclass(frozen=True)
class HandOut:
    """The step has its groups: those that were kept and, in the order of admission, all that were `dropped`."""

    wanted: int
    kept: list[Group]
    dropped: list[Group]


@dataclass
class Stream:
    """Groups for one step after the other: asked for n, it starts n prompts and, as long as the filter drops groups and
    leaves refills, as many again as are short. Groups are handed out in the order of their admission."""

    n: int  # trajectories of a prompt
    group_filter: Filter | None = None
    observe: Callable[[Sequence[Group]], None] = lambda groups: None  # is shown every complete round
    _wanted: int = 0
    _refills: int = 0
    _kept: list[Group] = field(default_factory=list)
    _dropped: list[Group] = field(default_factory=list)
    _missing: int = 0  # trajectories of the round
    _round: dict[str, tuple[Prompt, dict[int, Trajectory]]] = field(default_factory=dict)  # by uid of the prompt

    def ask(self, count: int) -> Start:
        """Begins a step of `count` groups."""
        self._wanted, self._refills, self._kept, self._dropped = count, 0, [], []
        return Start(count)

    def started(self, prompts: Sequence[Prompt]) -> None:
        """Notes the prompts that are being sampled, in the order of their admission."""
        self._round = {prompt.uid: (prompt, {}) for prompt in prompts}
        self._missing = self.n * len(self._round)

    def on_scored(self, trajectory: Trajectory) -> Start | HandOut | None:
        """Notes a scored trajectory, or one with a failure."""
        samples = self._round[trajectory.prompt.uid][1]
        self._missing -= trajectory.sample not in samples
        samples[trajectory.sample] = trajectory
        if self._missing:
            return None
        groups = [
            Group(prompt, tuple(samples[sample] for sample in range(self.n)))
            for prompt, samples in self._round.values()
        ]
        self.observe(groups)
        return self._after_round(groups)

    def _after_round(self, groups: Sequence[Group]) -> Start | HandOut:
        if self.group_filter is None:
            return HandOut(self._wanted, list(groups), [])
        for group in groups:
            (self._kept if self.group_filter.keep(group) else self._dropped).append(group)
        short = self._wanted - len(self._kept)
        all_failed = all(each.failure is not None for group in groups for each in group.trajectories)
        if short == 0 or all_failed or self._refills == self.group_filter.max_refills:
            return HandOut(self._wanted, self._kept, self._dropped)
        self._refills += 1
        return Start(short)


def _metric(trajectory: Trajectory, name: str) -> float:
    numbers = {**trajectory.parts, "accuracy": trajectory.accuracy or 0.0, "reward": trajectory.score}
    if name not in numbers:
        raise DataError(
            f"algorithm.filter.metric={name}, which the reward does not report for {trajectory.uid}; "
            f"it reports {', '.join(sorted(numbers))}"
        )
    return numbers[name]
