# SPDX-License-Identifier: Apache-2.0
"""Reward processes in a pool of `cluster.placement`, on another machine as a rule, behind the interface of a scorer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from whet.config.schema import ModelConfig, RewardConfig
from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import Placement
from whet.controller.worker_group import WorkerGroup
from whet.rewards.pool import build_scorer
from whet.rollout.fleet import Done, Fleet, Task
from whet.rollout.protocol import POLL_SECONDS
from whet.rollout.replicas import Ranks
from whet.trainers.measured import MeasuredWorker
from whet.types import Outcome, RewardItem

ROLE = "reward"


class RewardWorker(MeasuredWorker):
    """The process that owns the reward processes of its machine."""

    is_replica = True

    def __init__(
        self, placement: Placement, config: RewardConfig, function: Callable[..., Any] | None, model: ModelConfig
    ) -> None:
        super().__init__(placement)
        self._scorer = build_scorer(config, function, model)

    @register()
    def scores_alone(self, caller: int) -> bool:
        """True where `caller`, a process, may submit items one by one, and does not wait for each."""
        return self._scorer.scores_alone and caller != os.getpid()

    @register(Dispatch.ONE_TO_ALL, concurrent=True)
    def serve(self, batches: Sequence[Task], ended: Sequence[str], timeout_seconds: float) -> list[Done]:
        """Returns the outcomes of all items of batches, in order."""
        pending = [(each, self._scorer.submit_batch(each.what)) for each in batches]
        return [Done(each.uid, outcomes.result(), each.attempt) for each, outcomes in pending]

    def close(self) -> None:
        self._scorer.close()


class PlacedRewards:
    """The scorer of a run whose reward processes belong to the ranks of a group. Items go to the rank that has the
    fewest, and to another if theirs is lost; the loss of the last rank ends the run."""

    def __init__(self, group: WorkerGroup) -> None:
        self.ranks, self._uids = Ranks(group, Fleet(), concurrent=True), map(str, count())
        self.ranks.join(range(group.world_size))
        self.scores_alone: bool = group.start_on(0, "scores_alone", os.getpid()).result()
        self.found: dict[str, list[Outcome]] = {}  # outcomes that nobody asked for yet, by uid

    def submit_batch(self, items: Sequence[RewardItem]) -> Placed:
        task = Task(next(self._uids), list(items), size=len(items))
        self.ranks.submit(task)
        self.turn(0.0)
        return Placed(self, task.uid)

    def turn(self, timeout_seconds: float) -> None:
        """Takes outcomes that have come.  Raises: what a worker raises, and LostWorkerError where none is left."""
        self.found |= {event.uid: event.what for event in self.ranks.turn(timeout_seconds)}

    def close(self) -> None:
        """Does nothing: the workers end with the roles of their launch."""


@dataclass
class Placed:
    """The outcomes of items on the ranks of `rewards`."""

    rewards: PlacedRewards
    uid: str

    def done(self) -> bool:
        """Tells whether `result` returns at once."""
        if self.uid not in self.rewards.found:
            self.rewards.turn(0.0)
        return self.uid in self.rewards.found

    def result(self) -> list[Outcome]:
        """Returns an outcome for each item, in order.  Raises: as `PlacedRewards.turn`."""
        while self.uid not in self.rewards.found:
            self.rewards.turn(POLL_SECONDS)
        return self.rewards.found.pop(self.uid)
