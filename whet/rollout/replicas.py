# SPDX-License-Identifier: Apache-2.0
"""The ranks of a rollout as one engine: each takes the next requests as it has room, and none waits for another.

`Router` decides; `Replicas` calls the ranks for it. A rank whose engine is lost is started again, and the others go on
with its requests. A worker group ends with the first of its processes that is lost or does not answer in time: that is
an error of `poll`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable
from concurrent.futures import FIRST_COMPLETED, wait

from whet.controller.worker_group import PendingCall, WorkerGroup
from whet.errors import EngineError
from whet.rollout.protocol import Event, Lost, Request, Status, Weights
from whet.rollout.router import Abort, Command, Give, Replica, Router, Tell

log = logging.getLogger(__name__)
GATHER_SECONDS = 0.02  # a rank in another process gathers results for this time: a call costs a fraction of it


class Replicas:
    """Ranks whose worker has the method `serve(requests, aborted, timeout_seconds, gathers) -> events`, and `restart()`
    where one of the events may be Lost.

    A rank in this process returns with its first event; one in another process `gathers` some, as a call costs time.
    Weights reach the ranks by calls of the weight sync, all ranks together and between two polls: to the router they
    have the newest ones always.
    """

    def __init__(self, group: WorkerGroup, max_batch_size: int, *, gathers: bool) -> None:
        self._group, self._gathers = group, gathers
        # A rank has a few more than it can run, so that it need not wait for the next ones; a single one has all.
        most = max_batch_size + max_batch_size // 4
        self._router = Router(most if group.world_size > 1 else sys.maxsize)
        for rank in range(group.world_size):
            self._join(rank)
        self._to_abort: list[set[str]] = [set() for _ in range(group.world_size)]
        self._calls: dict[int, PendingCall] = {}  # under way, by rank
        self._restarts: dict[int, PendingCall] = {}  # of ranks that the router does not know at the time
        self._events: list[Event] = []

    def submit(self, request: Request) -> bool:
        """Takes a request, for `poll` to give to a rank."""
        self._carry_out(self._router.submit(request))
        return True

    def poll(self, timeout_seconds: float) -> list[Event]:
        """Gives waiting requests out, and returns the first events.  Raises: what an engine or a lost worker raises."""
        self._call(timeout_seconds)
        under_way = [*self._calls.values(), *self._restarts.values()]
        if under_way and not self._events:
            replies = [reply for call in under_way for reply in call.replies.values()]
            wait(replies, timeout=timeout_seconds + GATHER_SECONDS, return_when=FIRST_COMPLETED)
        for rank in [rank for rank, call in self._calls.items() if call.done()]:
            self._take(rank)
        for rank in [rank for rank, call in self._restarts.items() if call.done()]:
            self._restarts.pop(rank).result()
            self._join(rank)
            log.warning("rank %d of the rollout samples again", rank)
        events, self._events = self._events, []
        return events

    def abort(self, uids: Collection[str]) -> None:
        """Ends requests; those that a rank has come out of a later `poll`."""
        self._carry_out(self._router.abort(uids))

    def pause(self) -> None:
        """Stops sampling on all ranks; the next `poll` has the tokens so far of all requests."""
        for rank in list(self._calls):
            self._take(rank)
        self._router.pause()
        self._group.pause()
        for rank, each in self._ranks.items():
            if each.given:
                self._calls[rank] = self._group.start_on(rank, "serve", (), (), 0.0, False)
        for rank in list(self._calls):
            self._take(rank)

    def resume(self) -> None:
        self._router.resume()
        self._group.resume()

    def load(self, weights: Weights, version: int) -> None:
        """Raises: EngineError, as each rank is filled by the weight sync."""
        raise EngineError("the ranks of a rollout are filled by weight sync, not one by one; call the run's sync")

    def status(self) -> Status:
        """The oldest version on any rank, all requests that run and wait, and the oldest of them."""
        ranks: list[Status] = self._group.status()
        oldest = max(ranks, key=lambda status: status.oldest_seconds)
        return Status(
            version=min(status.version for status in ranks),
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
        found: list[Event | Lost] = self._calls.pop(rank).result()
        generation = self._ranks[rank].generation
        self._carry_out(
            self._router.on_events(rank, generation, [each for each in found if not isinstance(each, Lost)])
        )
        for loss in [each for each in found if isinstance(each, Lost)]:
            log.warning("rank %d of the rollout is started again: %s", rank, loss.why)
            self._carry_out(self._router.on_lost(rank, generation))
            self._to_abort[rank].clear()
            self._restarts[rank] = self._group.start_on(rank, "restart")

    def _join(self, rank: int) -> None:
        """Gives requests to a rank, which has the newest weights."""
        self._router.on_join(rank)
        self._router.on_loaded(rank, self._ranks[rank].generation, self._router.version)

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Tell):
                self._events.append(command.event)
            elif isinstance(command, Abort):
                self._to_abort[command.replica].update(command.uids)

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
