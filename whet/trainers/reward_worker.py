# SPDX-License-Identifier: Apache-2.0
"""Reward processes in a pool of `cluster.placement`, on another machine as a rule, behind the interface of a scorer."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from whet.config.schema import ModelConfig, RewardConfig
from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import Placement
from whet.controller.worker_group import PendingCall, WorkerGroup
from whet.errors import LostWorkerError
from whet.rewards.pool import build_scorer
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
    def score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        """Returns an outcome for each item, in order."""
        return self._scorer.submit_batch(items).result()

    def close(self) -> None:
        self._scorer.close()


class PlacedRewards:
    """The scorer of a run whose reward processes belong to the ranks of a group. Items go to the rank that has the
    fewest, and to another if theirs is lost; the loss of the last rank ends the run."""

    def __init__(self, group: WorkerGroup) -> None:
        self._group, self._lock = group, threading.Lock()
        self._waiting = dict.fromkeys(range(group.world_size), 0)  # items by rank, without ranks that are lost
        self.scores_alone: bool = group.start_on(0, "scores_alone", os.getpid()).result()

    def submit_batch(self, items: Sequence[RewardItem]) -> Placed:
        return Placed(self, list(items), self.start(list(items)))

    def close(self) -> None:
        """Does nothing: the workers end with the roles of their launch."""

    def start(self, items: list[RewardItem], lost: LostWorkerError | None = None) -> PendingCall:
        """Starts to score on a rank, after the loss of another.  Raises: LostWorkerError where none is left."""
        with self._lock:
            rank = min(self._waiting, key=self._waiting.__getitem__, default=None)
            if rank is None:
                raise lost or LostWorkerError("all ranks of the role reward are lost; start the run again")
            self._waiting[rank] += len(items)
        try:
            call = self._group.start_on(rank, "score", items)
        except LostWorkerError as error:
            self._finish(rank, 0, error)
            return self.start(items, lost or error)
        call.replies[rank].add_done_callback(lambda reply: self._finish(rank, len(items), reply.exception()))
        return call

    def _finish(self, rank: int, count: int, error: BaseException | None) -> None:
        with self._lock:
            if isinstance(error, LostWorkerError):
                self._waiting.pop(rank, None)
            elif rank in self._waiting:
                self._waiting[rank] -= count


@dataclass
class Placed:
    """The outcomes of items on the ranks of `rewards`."""

    rewards: PlacedRewards
    items: list[RewardItem]
    call: PendingCall

    def done(self) -> bool:
        """Tells whether `result` returns at once, but for a loss."""
        return self.call.done()

    def result(self) -> list[Outcome]:
        """Returns an outcome for each item, in order.  Raises: as `PendingCall.result`."""
        while True:
            try:
                outcomes: list[Outcome] = self.call.result()
                return outcomes
            except LostWorkerError as error:
                if not self.call.is_lost:
                    raise
                self.call = self.rewards.start(self.items, error)
