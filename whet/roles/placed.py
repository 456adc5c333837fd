# SPDX-License-Identifier: Apache-2.0
"""Environments and reward processes in the pools of `cluster.placement`, usually on other machines. `PlacedHost` is an
environment host, `PlacedRewards` a scorer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any

from whet.config.environment import EnvironmentConfig
from whet.config.schema import ModelConfig, RewardConfig
from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import Placement
from whet.controller.worker_group import WorkerGroup
from whet.environments.host import EnvironmentHost, Result
from whet.environments.protocol import Answer
from whet.rewards.pool import build_scorer
from whet.roles.telemetry import MeasuredWorker
from whet.rollout.build import open_environments
from whet.rollout.driver import SHORT_SECONDS
from whet.rollout.episode import MAIN
from whet.rollout.fleet import Done, Fleet, FleetTask
from whet.rollout.protocol import POLL_SECONDS
from whet.rollout.replicas import RankDriver
from whet.types import Outcome, Prompt, RewardItem

ENVIRONMENT, REWARD = "environment", "reward"  # roles


class EnvironmentWorker(MeasuredWorker):
    """A rank that runs environments in processes: at most `environment.max_episodes`."""

    is_replica = True

    def __init__(self, placement: Placement, config: EnvironmentConfig) -> None:
        super().__init__(placement)
        self._undo = ExitStack()
        self._hosts = open_environments(config, self._undo)
        self._open: dict[str, FleetTask] = {}  # the last call of each running episode, by uid

    @register(Dispatch.ONE_TO_ALL)
    def serve(self, calls: Sequence[FleetTask], ended: Sequence[str], timeout_seconds: float) -> list[Done]:
        """Ends the episodes in `ended`, starts the `calls` (agent, method, arguments), and waits for the first
        results.  Returns (agent, result) by episode. The result None means that an episode's reset has begun."""
        for uid in ended:
            agent, *_ = self._open.pop(uid).what
            self._hosts[agent].close(uid)
        for call in calls:
            agent, method, *arguments = call.what
            self._open[call.uid] = call
            getattr(self._hosts[agent], method)(call.uid, *arguments)
        seconds = timeout_seconds if len(self._hosts) == 1 else min(timeout_seconds, SHORT_SECONDS)
        results = [(agent, *result) for agent, host in self._hosts.items() for result in host.poll(seconds)]
        begun = [(agent, uid, None) for agent, host in self._hosts.items() for uid in host.begun()]
        return [
            Done(uid, (agent, outcome), self._open[uid].attempt, is_last=outcome is not None)
            for agent, uid, outcome in (*begun, *results)
        ]

    def close(self) -> None:
        self._undo.close()


def placed_hosts(group: WorkerGroup, config: EnvironmentConfig) -> dict[str, EnvironmentHost]:
    """Opens an environment host for the main agent and each sub-agent, by name. Episodes run on the ranks of `group`: a
    new episode goes to the rank with the fewest episodes. If this rank is lost, the episode starts again on another
    rank, with the same seed and turns. The loss of the last rank ends the run."""
    ranks, hosts, attempts = RankDriver(group, Fleet(has_parts=True)), dict[str, PlacedHost](), count()
    ranks.join(range(group.world_size))
    return {agent: PlacedHost(agent, ranks, hosts, attempts) for agent in (MAIN, *config.agents)}


class PlacedHost(EnvironmentHost):
    """The environment host of one agent. The ranks behind it serve all agents in `hosts`."""

    def __init__(self, agent: str, ranks: RankDriver, hosts: dict[str, PlacedHost], attempts: Iterator[int]) -> None:
        super().__init__()
        self._agent, self._ranks, self._hosts, self._attempts = agent, ranks, hosts, attempts
        hosts[agent] = self

    def start(self, uid: str, prompt: Prompt, seed: int) -> None:
        self._ranks.submit(FleetTask(uid, (self._agent, "start", prompt, seed), next(self._attempts)))

    def step(self, uid: str, answer: Answer) -> None:
        self._ranks.submit(FleetTask(uid, (self._agent, "step", answer)))

    def close(self, uid: str) -> None:
        self._forget(uid)
        self._ranks.abort([uid], silently=True)

    def poll(self, timeout_seconds: float) -> list[Result]:
        if not self._results:
            for event in self._ranks.turn(timeout_seconds):
                agent, outcome = event.what
                if event.is_last:
                    self._hosts[agent]._results.append((event.uid, outcome))
                else:
                    self._hosts[agent]._begun[event.uid] = None
        return super().poll(0.0)

    def shutdown(self) -> None:
        """Does nothing: the processes end with the roles of the launch."""


class RewardWorker(MeasuredWorker):
    """A rank that owns the reward processes on its machine."""

    is_replica = True

    def __init__(
        self, placement: Placement, config: RewardConfig, function: Callable[..., Any] | None, model: ModelConfig
    ) -> None:
        super().__init__(placement)
        self._scorer = build_scorer(config, function, model)

    @register()
    def scores_alone(self, caller: int) -> bool:
        """Tells whether process `caller` may submit single items without waiting for each result."""
        return self._scorer.scores_alone and caller != os.getpid()

    @register(Dispatch.ONE_TO_ALL, concurrent=True)
    def serve(self, batches: Sequence[FleetTask], ended: Sequence[str], timeout_seconds: float) -> list[Done]:
        """Returns the outcomes of all items in `batches`, in order."""
        pending = [(each, self._scorer.submit_batch(each.what)) for each in batches]
        return [Done(each.uid, outcomes.result(), each.attempt) for each, outcomes in pending]

    def close(self) -> None:
        self._scorer.close()


class PlacedRewards:
    """The scorer of a run whose reward processes belong to ranks. A batch of items goes to the rank with the fewest
    items. If that rank is lost, the batch goes to another; the loss of the last rank ends the run."""

    def __init__(self, group: WorkerGroup) -> None:
        self.ranks, self._uids = RankDriver(group, Fleet(), concurrent=True), map(str, count())
        self.ranks.join(range(group.world_size))
        self.scores_alone: bool = group.start_on(0, "scores_alone", os.getpid()).result()
        self.found: dict[str, list[Outcome]] = {}  # outcomes that have arrived and were not returned yet, by batch

    def submit_batch(self, items: Sequence[RewardItem]) -> Placed:
        task = FleetTask(next(self._uids), list(items), size=len(items))
        self.ranks.submit(task)
        self.turn(0.0)
        return Placed(self, task.uid)

    def turn(self, timeout_seconds: float) -> None:
        """Collects the outcomes that have arrived.  Raises: errors of workers; LostWorkerError if no rank is left."""
        self.found |= {event.uid: event.what for event in self.ranks.turn(timeout_seconds)}

    def close(self) -> None:
        """Does nothing: the workers end with the roles of their launch."""


@dataclass
class Placed:
    """The pending outcomes of items that `rewards` has sent to ranks."""

    rewards: PlacedRewards
    uid: str

    def done(self) -> bool:
        if self.uid not in self.rewards.found:
            self.rewards.turn(0.0)
        return self.uid in self.rewards.found

    def result(self) -> list[Outcome]:
        """Returns an outcome for each item, in order.  Raises: as `PlacedRewards.turn`."""
        while self.uid not in self.rewards.found:
            self.rewards.turn(POLL_SECONDS)
        return self.rewards.found.pop(self.uid)
