# SPDX-License-Identifier: Apache-2.0
"""Environments in a pool of `cluster.placement`, on other machines as a rule, behind the interface of a host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count

from whet.config.environment import EnvironmentConfig
from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import Placement
from whet.controller.worker_group import WorkerGroup
from whet.environments.host import EnvironmentHost, Result
from whet.environments.protocol import Answer
from whet.rollout.build import open_environments
from whet.rollout.collect import SHORT_SECONDS
from whet.rollout.episode import MAIN
from whet.rollout.fleet import Done, Fleet, Task
from whet.rollout.replicas import Ranks
from whet.trainers.measured import MeasuredWorker
from whet.types import Prompt

ROLE = "environment"


class EnvironmentWorker(MeasuredWorker):
    """A rank that owns the processes of environments, `environment.max_episodes` of them at most."""

    is_replica = True

    def __init__(self, placement: Placement, config: EnvironmentConfig) -> None:
        super().__init__(placement)
        self._undo = ExitStack()
        self._hosts = open_environments(config, self._undo)
        self._open: dict[str, Task] = {}  # last calls, by id of the episode

    @register(Dispatch.ONE_TO_ALL)
    def serve(self, calls: Sequence[Task], ended: Sequence[str], timeout_seconds: float) -> list[Done]:
        """Ends episodes, carries out calls (agent, method, arguments), and waits for first results.  Returns these with
        their agents, behind None for episodes whose reset has begun."""
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
    """Opens hosts by agent, of environments on the ranks of a group. An episode is a task whose parts are its reset and
    its turns: it stays on its rank, the one with the fewest; where that is lost, it begins again on another, with its
    seed and turns. The loss of the last rank ends the run."""
    ranks, hosts, attempts = Ranks(group, Fleet(has_parts=True)), dict[str, PlacedHost](), count()
    ranks.join(range(group.world_size))
    return {agent: PlacedHost(agent, ranks, hosts, attempts) for agent in (MAIN, *config.agents)}


class PlacedHost(EnvironmentHost):
    """The environments of an agent on ranks that serve all `hosts`."""

    def __init__(self, agent: str, ranks: Ranks, hosts: dict[str, PlacedHost], attempts: Iterator[int]) -> None:
        super().__init__()
        self._agent, self._ranks, self._hosts, self._attempts = agent, ranks, hosts, attempts
        hosts[agent] = self

    def start(self, uid: str, prompt: Prompt, seed: int) -> None:
        self._ranks.submit(Task(uid, (self._agent, "start", prompt, seed), next(self._attempts)))

    def step(self, uid: str, answer: Answer) -> None:
        self._ranks.submit(Task(uid, (self._agent, "step", answer)))

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
