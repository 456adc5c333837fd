# SPDX-License-Identifier: Apache-2.0
"""Reward processes in a pool of `cluster.placement`, on another machine as a rule, behind the interface of a scorer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from whet.config.schema import ModelConfig, RewardConfig
from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import Placement, Worker
from whet.controller.worker_group import PendingCall, WorkerGroup
from whet.rewards.pool import build_scorer
from whet.types import Outcome, RewardItem

ROLE = "reward"


class RewardWorker(Worker):
    """The process that owns the reward processes of its machine."""

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
    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """Returns an outcome for each item, in order."""
        return self._scorer.submit_batch(items).result()

    def close(self) -> None:
        """Ends the reward processes."""
        self._scorer.close()


class PlacedRewards:
    """The scorer of a run whose reward processes belong to a worker. The loss of the worker ends the run."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self.scores_alone: bool = group.start_on(0, "scores_alone", os.getpid()).result()

    def submit_batch(self, items: Sequence[RewardItem]) -> PendingCall:
        """Starts to score the items."""
        return self._group.start_on(0, "score", list(items))

    def close(self) -> None:
        """Does nothing: the worker ends with the roles of its launch."""
