# SPDX-License-Identifier: Apache-2.0
"""The ranks of a rollout as one engine: each takes the next requests as it has room, and none waits for another.

`Router` decides; `Replicas` carries its commands out. The others go on with the requests of a rank that is lost. Where
only its engine is, the rank starts that again; a process that died or hangs is replaced by another, which samples after
the next weight sync. Where nothing can replace it, or none is left that has weights, its error is that of `poll`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

from whet.controller.worker_group import PendingCall, WorkerGroup
from whet.errors import DeadlineError, EngineError, LostWorkerError
from whet.rollout.protocol import Event, Lost, Request, Status, Weights
from whet.rollout.router import Abort, Command, Generation, Give, Load, Pause, Replica, Resume, Router, Synced, Tell

log = logging.getLogger(__name__)
RESTARTS = 3  # of a rank's process: what ends it again and again would end the next one too
GATHER_SECONDS = 0.02  # a rank in another process gathers results for this time: a call costs a fraction of it


class Replicas:
    """Ranks whose worker has the method `serve(requests, aborted, timeout_seconds, gathers) -> events`, and `restart()`
    where one of the events may be Lost.

    A rank in this process returns with its first event; one in another process `gathers` some, as a call costs time.
    Weights come by `sync`, which another thread may call; without a `weight_sync` the ranks have theirs from the start.
    """

    reads_trained_weights = False  # each has a copy, or a process of its own

    def __init__(
        self, group: WorkerGroup, max_batch_size: int, *, gathers: bool, weight_sync: Callable[..., str] | None = None
    ) -> None:
        self._group, self._gathers, self._weight_sync = group, gathers, weight_sync
        # A rank has a few more than it can run, so that it need not wait for the next ones; a single one has all.
        most = max_batch_size + max_batch_size // 4
        self._router = Router(most if group.world_size > 1 else sys.maxsize)
        self._turn = threading.RLock()  # over all that follows
        self._to_abort: list[set[str]] = [set() for _ in range(group.world_size)]
        self._calls: dict[int, PendingCall] = {}  # under way, by rank
        self._restarts: dict[int, PendingCall] = {}  # of engines, whose ranks the router does not know at the time
        self._starts: dict[int, PendingCall] = {}  # of processes
        self._to_start: list[int] = []  # ranks lost during a weight sync, whose calls no other process may get
        self._new = set(range(group.world_size))  # ranks without weights
        self._loads: dict[int, Generation] = {}  # of weights, by rank
        self._is_loading = False
        self._left = [RESTARTS] * group.world_size  # replacements of each rank's process
        self._version = 0
        self.num_lost = 0  # ranks, since the start
        self._events: list[Event] = []
        if weight_sync is None:
            self._join(range(group.world_size))
            for rank in range(group.world_size):
                self._on_loaded(rank)

    def submit(self, request: Request) -> bool:
        """Takes a request, for `poll` to give to a rank."""
        with self._turn:
            self._carry_out(self._router.submit(request))
        return True

    def poll(self, timeout_seconds: float) -> list[Event]:
        """Gives waiting requests out, and returns the first events.  Raises: what an engine or a lost worker raises."""
        with self._turn:
            self._call(timeout_seconds)
            under_way = [*self._calls.values(), *self._restarts.values()]
            waits_for_weights = not under_way and bool(self._router.waiting)
            has_events = bool(self._events)
        if waits_for_weights and not has_events:
            time.sleep(min(timeout_seconds, GATHER_SECONDS))
        elif under_way and not has_events:
            replies = [reply for call in under_way for reply in call.replies.values()]
            wait(replies, timeout=timeout_seconds + GATHER_SECONDS, return_when=FIRST_COMPLETED)
        with self._turn:
            for call in (*self._calls.values(), *self._restarts.values(), *self._starts.values()):
                call.expire()
            for rank in [rank for rank, call in self._calls.items() if call.done()]:
                self._take(rank)
            if not self._router.is_paused:
                self._take_starts()
            events, self._events = self._events, []
        return events

    def abort(self, uids: Collection[str]) -> None:
        """Ends requests; those that a rank has come out of a later `poll`."""
        with self._turn:
            self._carry_out(self._router.abort(uids))

    def pause(self) -> None:
        """Stops sampling on all ranks; the next `poll` has the tokens so far of all requests."""
        with self._turn:
            for rank in list(self._calls):
                self._take(rank)
            self._carry_out(self._router.pause())
            for rank, each in self._ranks.items():
                if each.given:
                    self._calls[rank] = self._group.start_on(rank, "serve", (), (), 0.0, False)
            for rank in list(self._calls):
                self._take(rank)

    def resume(self) -> None:
        with self._turn:
            self._carry_out(self._router.resume())

    def load(self, weights: Weights, version: int) -> None:
        """Raises: EngineError, as each rank is filled by the weight sync."""
        raise EngineError("the ranks of a rollout are filled by weight sync, not one by one; call the run's sync")

    def sync(self, version: int) -> str:
        """Sends the weights of a version to all ranks, new ones too, and returns when all that sample have them, with
        their digest.

        Raises: WeightSyncError, DeadlineError, WorkerError."""
        assert self._weight_sync is not None
        with self._turn:
            self._carry_out(self._router.on_weights(version))
            self._join(sorted(self._new))
            self._new.clear()
            ranks = sorted({*self._loads, *self._restarts})  # an engine that starts keeps the weights for later
            processes = {rank: self._left[rank] for rank in ranks}
            self._is_loading = True
        lost = dict[int, LostWorkerError | DeadlineError]()
        digest = self._weight_sync(version, processes, lost)
        with self._turn:
            self._is_loading = False
            self._start_processes()
            for rank in [rank for rank in processes if rank in self._loads]:  # others were lost meanwhile
                if rank in lost:
                    self._replace(rank, lost[rank])
                else:
                    self._on_loaded(rank)
        return digest

    def status(self) -> Status:
        """The version that all ranks sample with, all requests that run and wait, and the oldest of them."""
        with self._turn:
            calls = [self._group.start_on(rank, "status") for rank in self._ranks]
        ranks: list[Status] = [call.result() for call in calls]
        oldest = max(ranks, key=lambda status: status.oldest_seconds, default=Status(self._version, 0, 0))
        return Status(
            version=self._version,
            running=sum(status.running for status in ranks),
            waiting=len(self._router.waiting) + sum(status.waiting for status in ranks),
            oldest=oldest.oldest,
            oldest_seconds=oldest.oldest_seconds,
        )

    def close(self) -> None:
        self._group.close()

    @property
    def _ranks(self) -> dict[int, Replica]:
        return self._router.replicas

    def _take(self, rank: int) -> None:
        """Takes the events of a rank, and waits for them."""
        found: list[Event | Lost] = self._result(rank, self._calls) or []
        if rank not in self._ranks:
            return
        events = [each for each in found if not isinstance(each, Lost)]
        self._carry_out(self._router.on_events(rank, self._ranks[rank].generation, events))
        for loss in [each for each in found if isinstance(each, Lost)]:
            log.warning("rank %d of the rollout is started again: %s", rank, loss.why)
            self._forget(rank)
            self._restarts[rank] = self._group.start_on(rank, "restart")

    def _take_starts(self) -> None:
        """Lets engines that were started again sample, and new processes after the next weights."""
        for rank in [rank for rank, call in self._restarts.items() if call.done()]:
            self._result(rank, self._restarts)
            if rank not in (*self._starts, *self._to_start):
                self._join([rank])
                if not self._is_loading:  # it has the newest weights
                    self._on_loaded(rank)
                log.warning("rank %d of the rollout samples again", rank)
        for rank in [rank for rank, call in self._starts.items() if call.done()]:
            self._result(rank, self._starts)
            if rank not in (*self._starts, *self._to_start):
                self._new.add(rank)
                log.warning("rank %d of the rollout runs again, and samples after the next weight sync", rank)

    def _result(self, rank: int, calls: dict[int, PendingCall]) -> Any:
        """The result of a call. Where it is the loss of its rank, another process takes its place."""
        call = calls.pop(rank)
        try:
            return call.result()
        except (LostWorkerError, DeadlineError) as error:
            if not call.is_lost:
                raise
            self._replace(rank, error)

    def _replace(self, rank: int, error: LostWorkerError | DeadlineError) -> None:
        """Starts another process in the place of a lost one.  Raises: `error` where that is of no use."""
        self._forget(rank)
        if not self._left[rank] or not (self._ranks or self._restarts):
            raise error
        self._left[rank] -= 1
        log.warning(
            "rank %d of the rollout is started again (%d of %d times): %s",
            *(rank, RESTARTS - self._left[rank], RESTARTS, error),
        )
        self._to_start.append(rank)
        if not self._is_loading:
            self._start_processes()

    def _start_processes(self) -> None:
        while self._to_start:
            rank = self._to_start.pop()
            self._starts[rank] = self._group.start_again(rank)

    def _forget(self, rank: int) -> None:
        """Gives the requests of a lost rank to the others."""
        self.num_lost += 1
        self._to_abort[rank].clear()
        self._calls.pop(rank, None)
        self._loads.pop(rank, None)
        if rank in self._ranks:
            self._carry_out(self._router.on_lost(rank, self._ranks[rank].generation))

    def _join(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._carry_out(self._router.on_join(rank))

    def _on_loaded(self, rank: int) -> None:
        self._carry_out(self._router.on_loaded(rank, self._loads.pop(rank), self._router.version))

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Tell):
                self._events.append(command.event)
            elif isinstance(command, Abort):
                self._to_abort[command.replica].update(command.uids)
            elif isinstance(command, Load):
                self._loads[command.replica] = command.generation  # for `sync`
            elif isinstance(command, Pause | Resume):
                self._group.start_on(command.replica, "pause" if isinstance(command, Pause) else "resume")
            elif isinstance(command, Synced):
                self._version = command.version

    def _call(self, timeout_seconds: float) -> None:
        """Asks every rank that has work and is not asked yet."""
        seconds = min(timeout_seconds, GATHER_SECONDS) if self._gathers else timeout_seconds
        free = [rank for rank in self._ranks if rank not in self._calls]
        gives = [command for command in self._router.give(free) if isinstance(command, Give)]
        given = {command.replica: command.requests for command in gives}
        for rank in free:
            if self._ranks[rank].given:
                requests = given.get(rank, ())
                aborted, self._to_abort[rank] = tuple(self._to_abort[rank]), set()
                self._calls[rank] = self._group.start_on(rank, "serve", requests, aborted, seconds, self._gathers)
