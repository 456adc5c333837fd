# SPDX-License-Identifier: Apache-2.0
"""Environments in a pool of `cluster.placement`, on other machines as a rule, behind the interface of a host."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack
from itertools import count
from typing import Any

from whet.config.environment import EnvironmentConfig
from whet.controller.dispatch import Dispatch, register
from whet.controller.worker import Placement
from whet.controller.worker_group import PendingCall, WorkerGroup
from whet.environments.host import EnvironmentHost, Result
from whet.environments.protocol import Answer
from whet.errors import DeadlineError, LostWorkerError
from whet.rollout.build import open_environments
from whet.rollout.collect import SHORT_SECONDS
from whet.rollout.episode import MAIN
from whet.rollout.replicas import GATHER_SECONDS
from whet.trainers.measured import MeasuredWorker
from whet.types import Prompt

log = logging.getLogger(__name__)
ROLE = "environment"

Call = tuple[str, str, str, tuple[Any, ...]]  # agent, method, id of the episode, arguments


class EnvironmentWorker(MeasuredWorker):
    """A rank that owns the processes of environments, `environment.max_episodes` of them at most."""

    is_replica = True

    def __init__(self, placement: Placement, config: EnvironmentConfig) -> None:
        super().__init__(placement)
        self._undo = ExitStack()
        self._hosts = open_environments(config, self._undo)

    @register(Dispatch.ONE_TO_ALL)
    def serve(
        self, calls: Sequence[Call], timeout_seconds: float
    ) -> tuple[list[tuple[str, Result]], list[tuple[str, str]]]:
        """Carries out calls, and waits for first results.  Returns these and ids of begun episodes, with agents."""
        for agent, method, uid, arguments in calls:
            getattr(self._hosts[agent], method)(uid, *arguments)
        seconds = timeout_seconds if len(self._hosts) == 1 else min(timeout_seconds, SHORT_SECONDS)
        results = [(agent, result) for agent, host in self._hosts.items() for result in host.poll(seconds)]
        return results, [(agent, uid) for agent, host in self._hosts.items() for uid in host.begun()]

    def close(self) -> None:
        self._undo.close()


class PlacedEnvironments:
    """The ranks whose processes run the environments of a run. An episode stays on its rank, the one with the fewest
    episodes. Where a rank is lost, its episodes begin again on others, with their seeds and turns; the loss of the last
    one ends the run."""

    def __init__(self, group: WorkerGroup, config: EnvironmentConfig) -> None:
        self._group = group
        self.hosts = {agent: PlacedHost(self, agent) for agent in (MAIN, *config.agents)}
        self._numbers = count()
        self._placed: dict[str, tuple[str, int]] = {}  # by id of the open episodes: id on its rank, and the rank
        self._waiting: dict[str, str] = {}  # their ids by those on the rank, of calls that are under way
        self._history: dict[str, list[tuple[str, str, tuple[Any, ...]]]] = {}  # their calls: agent, method, arguments
        self._num_sent: dict[str, int] = {}  # of these calls to the present rank
        self._owed: set[str] = set()  # their ids, where the driver waits for a result
        self._ranks = [*range(group.world_size)]  # that are not lost
        self._calls: list[list[Call]] = [[] for _ in range(group.world_size)]  # not sent yet, by rank
        self._open: dict[int, PendingCall] = {}  # by rank

    def call(self, agent: str, method: str, uid: str, *arguments: Any) -> None:
        """Sends a call with the next `turn`, or behind those of a replay."""
        if method == "close":
            if uid in self._placed:
                own, rank = self._placed.pop(uid)
                self._calls[rank].append((agent, method, own, arguments))
                self._waiting.pop(own, None)
                self._owed.discard(uid)
                del self._history[uid], self._num_sent[uid]
            return
        if method == "start":
            self._history[uid] = []
            self._place(uid)
        self._history[uid].append((agent, method, arguments))
        self._owed.add(uid)
        if self._placed[uid][0] not in self._waiting:
            self._send(uid)

    def _place(self, uid: str) -> None:
        """Chooses a rank for an episode, on which it has yet to begin."""
        ranks = [rank for _, rank in self._placed.values()]
        self._placed[uid] = f"{uid}:{next(self._numbers)}", min(self._ranks, key=ranks.count)  # an id may be used again
        self._num_sent[uid] = 0

    def _send(self, uid: str) -> None:
        """Sends the next call of an episode."""
        own, rank = self._placed[uid]
        agent, method, arguments = self._history[uid][self._num_sent[uid]]
        self._num_sent[uid] += 1
        self._calls[rank].append((agent, method, own, arguments))
        self._waiting[own] = uid

    def turn(self, timeout_seconds: float) -> None:
        """Sends calls, and waits for first results, which go to their hosts.  Raises: what a lost worker raises."""
        busy = {self._placed[uid][1] for uid in self._waiting.values()}
        for rank in self._ranks:
            calls = self._calls[rank]
            if rank not in self._open and (calls or rank in busy):
                self._calls[rank] = []
                self._open[rank] = self._group.start_on(rank, "serve", calls, GATHER_SECONDS)
        replies = [reply for call in self._open.values() for reply in call.replies.values()]
        wait(replies, timeout=timeout_seconds, return_when=FIRST_COMPLETED)
        for call in self._open.values():
            call.expire()
        for rank in [rank for rank, call in self._open.items() if call.done()]:
            call = self._open.pop(rank)
            try:
                results, begun = call.result()
            except (LostWorkerError, DeadlineError) as error:
                if not call.is_lost:
                    raise
                self._lose(rank, error)
                continue
            for agent, own in begun:
                if own in self._waiting:
                    self.hosts[agent].note_begun(self._waiting[own])
            for agent, (own, outcome) in results:
                uid = self._waiting.pop(own, None)
                if uid is not None and self._num_sent[uid] < len(self._history[uid]):
                    self._send(uid)
                elif uid is not None and uid in self._owed:
                    self._owed.remove(uid)
                    self.hosts[agent].add((uid, outcome))

    def _lose(self, rank: int, error: LostWorkerError | DeadlineError) -> None:
        """Places the episodes of a lost rank on others.  Raises: `error` where there are none."""
        self._ranks.remove(rank)
        if not self._ranks:
            raise error
        gone = [uid for uid, (_, at) in self._placed.items() if at == rank]
        log.warning("%s; %d episodes begin again on other ranks, with their seeds and turns", error, len(gone))
        for uid in gone:
            self._waiting.pop(self._placed[uid][0], None)
            self._place(uid)
            self._send(uid)


class PlacedHost(EnvironmentHost):
    """The environments of an agent on the ranks of a group."""

    def __init__(self, ranks: PlacedEnvironments, agent: str) -> None:
        super().__init__()
        self._ranks, self._agent = ranks, agent

    def start(self, uid: str, prompt: Prompt, seed: int) -> None:
        self._ranks.call(self._agent, "start", uid, prompt, seed)

    def step(self, uid: str, answer: Answer) -> None:
        self._ranks.call(self._agent, "step", uid, answer)

    def close(self, uid: str) -> None:
        self._forget(uid)
        self._ranks.call(self._agent, "close", uid)

    def poll(self, timeout_seconds: float) -> list[Result]:
        if not self._results:
            self._ranks.turn(timeout_seconds)
        return super().poll(0.0)

    def add(self, result: Result) -> None:
        """Adds the result of an open episode."""
        self._results.append(result)

    def note_begun(self, uid: str) -> None:
        """Notes that an open episode began on its rank."""
        self._begun[uid] = None

    def shutdown(self) -> None:
        """Does nothing: the processes end with the roles of the launch."""
