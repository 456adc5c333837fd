# SPDX-License-Identifier: Apache-2.0
"""Drivers of fleets carry out commands on the ranks of a worker group, and wait for the ranks' events.

The ranks of a rollout form one engine. If a rank is lost, other ranks continue its requests. If only its engine is
lost, the rank restarts it; a process that died or hangs is replaced by a new one, which samples after the next weight
sync. If it cannot be replaced, or no rank with weights is left, `poll` raises the error of the process."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any, Protocol

from whet.controller.worker_group import PendingCall, WorkerGroup
from whet.errors import DeadlineError, EngineError, LostReplicaError, LostWorkerError
from whet.rollout.fleet import AnyEvent, AnyTask, Fleet, Router
from whet.rollout.ledger import MAX_UNFINISHED
from whet.rollout.protocol import Event, Lost, Request, Restarts, RolloutEngine, Status, Weights

log = logging.getLogger(__name__)
RESTARTS = 3  # of a rank's process: a cause that ends it several times would end the next one too
GATHER_SECONDS = 0.02  # a rank in another process gathers results for this time: a call costs a fraction of it


class RankDriver:
    """The driver of a fleet of ranks. The worker has the method `serve(tasks, ended, timeout_seconds, ...) -> events`:
    it takes tasks, ends tasks by uid, and waits for the first events. A rank serves one such call at a time; with
    `concurrent` several."""

    def __init__(self, group: WorkerGroup, fleet: Fleet, *options: bool, concurrent: bool = False) -> None:
        """`options` are passed to `serve` after its other arguments."""
        self.fleet, self._group, self._options, self._concurrent = fleet, group, options, concurrent
        self.num_lost = 0  # ranks, since the start
        self._turn = threading.RLock()  # guards all attributes below
        self._events: list[AnyEvent] = []  # for the next `turn` to return
        self._calls: dict[PendingCall, int] = {}  # running calls with their ranks: serve, restart (an engine), start
        self._heard = defaultdict[int, float](float)  # times of the last result, by rank
        self._to_start: list[int] = []  # ranks lost during a weight sync, to be started after it
        self._is_syncing = False

    def submit(self, task: AnyTask) -> bool:
        """Accepts a task. The next turn gives it to a rank."""
        with self._turn:
            self.fleet.submit(task)
        return True

    def abort(self, uids: Collection[str], *, silently: bool = False) -> None:
        """Ends tasks. The end of a task on a rank is an event of a later turn; with `silently` there is none."""
        with self._turn:
            self._events += self.fleet.abort(uids, silently=silently)

    def join(self, ranks: Iterable[int], version: int | None = 0) -> None:
        """Connects ranks that already have the weights of `version`; None for ranks that have none."""
        for rank in ranks:
            self._events += self.fleet.on_join(rank, version)

    def turn(self, timeout_seconds: float, rank_seconds: float = GATHER_SECONDS) -> list[AnyEvent]:
        """Gives tasks to free ranks, and returns the first events. A rank waits at most `rank_seconds` for events.

        Raises: errors of workers; the error of a lost rank that cannot be replaced."""
        with self._turn:
            self._call(rank_seconds)
            awaited = [call for call in self._calls if call.method != "start"]
            waits = not self._events and (awaited or self.fleet.waiting)
        if waits and awaited:
            replies = [reply for call in awaited for reply in call.replies.values()]
            wait(replies, timeout=timeout_seconds, return_when=FIRST_COMPLETED)
        elif waits:  # until ranks have weights
            time.sleep(min(rank_seconds, GATHER_SECONDS))
        with self._turn:
            for call, rank in list(self._calls.items()):
                if time.monotonic() - self._heard[rank] > call.deadline_seconds:
                    call.expire()
                if call in self._calls and call.done() and (call.method == "serve" or not self.fleet.is_paused):
                    self._take(call)
            events, self._events = self._events, []
        return events

    def _call(self, seconds: float) -> None:
        """Calls each rank that has work and no running call."""
        busy = () if self._concurrent else [*self._calls.values()]
        free = [rank for rank in self.fleet.ranks if rank not in busy]
        given = {each.rank: (each.tasks, each.ended) for each in self.fleet.give(free)}
        for rank in free:
            if rank in given or (self.fleet.is_asked(rank) and not self._concurrent):
                self._start(rank, "serve", *given.get(rank, ((), ())), seconds, *self._options)

    def _start(self, rank: int, method: str, *arguments: Any) -> None:
        self._calls[self._group.start_on(rank, method, *arguments)] = rank

    def _take(self, call: PendingCall) -> None:
        """Waits for the result of a call, and processes it."""
        rank = self._calls.pop(call)
        try:
            found = call.result()
        except (LostWorkerError, DeadlineError) as error:
            if not call.is_lost:
                raise
            self._replace(rank, error)
        else:
            self._heard[rank] = time.monotonic()
            self._hear(rank, call.method, found)

    def _hear(self, rank: int, method: str, found: list[AnyEvent]) -> None:
        self._events += self.fleet.on_events(rank, self.fleet.ranks[rank].generation, found)

    def _lose(self, rank: int) -> None:
        """Moves the tasks of a lost rank to other ranks."""
        self.num_lost += 1
        self._calls = {call: each for call, each in self._calls.items() if each != rank}
        if rank in self.fleet.ranks:
            self._events += self.fleet.on_lost(rank, self.fleet.ranks[rank].generation)

    def _replace(self, rank: int, error: LostWorkerError | DeadlineError) -> None:
        """Continues without a lost process, or starts a replacement.  Raises: `error` if neither is possible."""
        tasks = len(self.fleet.ranks[rank].given) if rank in self.fleet.ranks else 0
        self._lose(rank)
        is_last = "restart" not in [call.method for call in self._calls]
        if number := self.fleet.on_death(rank, error, is_last=is_last):
            what = f"is started again ({number} of {self.fleet.restarts} times)"
            log.warning("rank %d of the %s %s: %s", rank, self._group.role, what, error)
            self._to_start.append(rank)
            self._start_processes()
        else:
            log.warning("%s; other ranks go on with its %d tasks", error, tasks)

    def _start_processes(self) -> None:
        while self._to_start and not self._is_syncing:
            rank = self._to_start.pop()
            self._calls[self._group.start_again(rank)] = rank


class Replicas(RankDriver):
    """The rollout's ranks as one engine. It calls the methods of RolloutWorker.

    A rank in this process returns at its first event. A rank in another process `gathers` several, because a call takes
    time. `sync` brings weights; another thread may call it. Without `weight_sync` the ranks have weights from the
    start."""

    reads_trained_weights = False  # each rank has its own copy of the weights

    def __init__(
        self, group: WorkerGroup, max_batch_size: int, *, gathers: bool, weight_sync: Callable[..., str] | None = None
    ) -> None:
        # A rank gets a few requests more than it can run, so that it never waits for new ones; a single rank gets all.
        most = max_batch_size + max_batch_size // 4 if len(group.reporting) > 1 else sys.maxsize
        super().__init__(group, Router(most, restarts=RESTARTS), gathers)
        self._weight_sync, self._version = weight_sync, 0
        if weight_sync is None:
            self.join(group.reporting)

    def poll(self, timeout_seconds: float) -> list[Event]:
        """Gives waiting requests to ranks, and returns the first events.  Raises: errors of engines and workers."""
        gathers = self._options[0]
        seconds = min(timeout_seconds, GATHER_SECONDS) if gathers else timeout_seconds
        return self.turn(timeout_seconds + GATHER_SECONDS, seconds)

    def pause(self) -> None:
        """Stops sampling on all ranks. The next `poll` returns the tokens so far of all requests."""
        with self._turn:
            self._take_events()
            self.fleet.is_paused = True
            for rank in self.fleet.ranks:
                self._group.start_on(rank, "pause")
            self._call(0.0)
            self._take_events()

    def _take_events(self) -> None:
        for call in [each for each in self._calls if each.method == "serve"]:
            self._take(call)

    def resume(self) -> None:
        with self._turn:
            self.fleet.is_paused = False
            for rank in self.fleet.ranks:
                self._group.start_on(rank, "resume")

    def load(self, weights: Weights, version: int) -> None:
        """Raises: EngineError always, because only the weight sync may load weights into the ranks."""
        raise EngineError("weights of a rollout's ranks", "passed to `load`", "a weight sync", "call the run's sync")

    def sync(self, version: int) -> str:
        """Sends the weights of `version` to all ranks, including new ones. Waits until all sampling ranks have them,
        then returns the digest of the weights.

        Raises: WeightSyncError, DeadlineError, WorkerError."""
        assert self._weight_sync is not None
        with self._turn:
            self.fleet.on_weights(version)
            away = self._calls.values()
            self.join([n for n in self._group.reporting if n not in self.fleet.ranks and n not in away], None)
            restarting = [rank for call, rank in self._calls.items() if call.method == "restart"]
            # An engine that is starting stores the weights for later.
            processes = {rank: self.fleet.starts.get(rank, 0) for rank in sorted([*self._loading, *restarting])}
            self._is_syncing = True
        lost = dict[int, LostWorkerError | DeadlineError]()
        digest = self._weight_sync(version, processes, lost)
        with self._turn:
            self._is_syncing = False
            self._start_processes()
            for rank in [rank for rank in processes if rank in self._loading]:  # other ranks were lost during the sync
                if rank in lost:
                    self._replace(rank, lost[rank])
                else:
                    self.fleet.on_loaded(rank, self.fleet.ranks[rank].generation, version)
            self._version = version if self.fleet.is_synced else self._version
        return digest

    @property
    def _loading(self) -> list[int]:
        return [rank for rank, each in self.fleet.ranks.items() if each.loading is not None]

    def status(self) -> Status:
        """The version that all ranks sample with, all running and waiting requests, and the oldest request."""
        with self._turn:
            calls = [self._group.start_on(rank, "status") for rank in self.fleet.ranks]
        ranks: list[Status] = [call.result() for call in calls]
        oldest = max(ranks, key=lambda status: status.oldest_seconds, default=Status(self._version, 0, 0))
        return Status(
            version=self._version,
            running=sum(status.running for status in ranks),
            waiting=len(self.fleet.waiting) + sum(status.waiting for status in ranks),
            oldest=oldest.oldest,
            oldest_seconds=oldest.oldest_seconds,
        )

    def close(self) -> None:
        self._group.close()

    def _hear(self, rank: int, method: str, found: list[Event | Lost]) -> None:
        """Processes a rank's events. A restarted engine samples at once; a new process after the next weight sync."""
        if method == "start":
            log.warning("rank %d of the rollout runs again, and samples after the next weight sync", rank)
        elif method == "restart":
            self.join([rank], None if self._is_syncing else self.fleet.version)
            log.warning("rank %d of the rollout samples again", rank)
        else:
            super()._hear(rank, method, [event for event in found if not isinstance(event, Lost)])
            for loss in [event for event in found if isinstance(event, Lost)]:
                log.warning("rank %d of the rollout is started again: %s", rank, loss.why)
                self._lose(rank)
                self._start(rank, "restart")


class RestartingEngine(RolloutEngine, Restarts, Protocol):
    """A rollout engine whose server may be lost."""


class Restarted:
    """A single engine that restarts after a loss. The loss delays requests, but does not change their tokens.

    All other methods of `RolloutEngine` are the methods of `engine`."""

    def __init__(self, engine: RestartingEngine) -> None:
        self.engine, self._fleet = engine, Router(MAX_UNFINISHED)
        self._fleet.on_join(0, 0)
        self._events: list[Event] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, request: Request) -> bool:
        """Submits a request as `RolloutEngine.submit` does."""
        self.engine.check(request)
        if is_taken := len(self._fleet.flights) < MAX_UNFINISHED:
            self._fleet.submit(request)
        return is_taken

    def abort(self, uids: Collection[str]) -> None:
        """Ends requests as `RolloutEngine.abort` does."""
        self._events += self._fleet.abort(uids)

    def poll(self, timeout_seconds: float) -> list[Event]:
        """Polls the engine. After a loss this may take as long as the restart."""
        generation, events = self._fleet.ranks[0].generation, self._events
        self._events = []
        try:
            for give in self._fleet.give():
                self.engine.abort(give.ended)
                for request in give.tasks:
                    self.engine.submit(request)
            events += [] if events else self._fleet.on_events(0, generation, self.engine.poll(timeout_seconds))
        except LostReplicaError as error:
            log.warning("the rollout engine is started again: %s", error)
            events += self._fleet.on_lost(0, generation)
            self.engine.restart()
            self.engine.rejoin()
            self._fleet.on_join(0, 0)
        return events
