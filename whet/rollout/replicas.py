# SPDX-License-Identifier: Apache-2.0
"""The ranks of a rollout as one engine: each takes the next requests as it has room, and none waits for another.

The choice of a rank changes no token: random draws are keyed by request and position, and a request gives the same
tokens in any company.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from itertools import groupby

from whet.controller.worker_group import PendingCall, WorkerGroup
from whet.errors import EngineError
from whet.rollout.protocol import Completion, Event, Finished, Partial, Request, Status, Weights

BLOCKS_A_RANK = 4  # at least, of equal prompts: larger ones are split, so that every rank has its part
GATHER_SECONDS = 0.02  # a rank in another process gathers events for this time: a call costs a fraction of it


class Replicas:
    """Ranks whose worker has the method `serve(requests, aborted, timeout_seconds, gathers) -> events`.

    A rank in this process returns with its first event; one in another process `gathers` some, as a call costs time.
    Weights reach the ranks by calls of the weight sync, between two polls.
    """

    def __init__(self, group: WorkerGroup, max_batch_size: int, *, gathers: bool) -> None:
        self._group, self._gathers = group, gathers
        # A rank has a few more than it can run, so that it need not wait for the next ones.
        self._most = max_batch_size + max_batch_size // 4
        self._waiting: list[Request] = []  # not yet given to a rank
        self._given: list[set[str]] = [set() for _ in range(group.world_size)]  # unfinished uids, by rank
        self._to_abort: list[set[str]] = [set() for _ in range(group.world_size)]
        self._calls: dict[int, PendingCall] = {}  # under way, by rank
        self._events: list[Event] = []

    def submit(self, request: Request) -> bool:
        """Takes a request, for `poll` to give to a rank."""
        self._waiting.append(request)
        return True

    def poll(self, timeout_seconds: float) -> list[Event]:
        """Gives waiting requests out, and returns the first events.  Raises: what an engine or a lost worker raises."""
        self._call(timeout_seconds)
        if self._calls and not self._events:
            replies = [reply for call in self._calls.values() for reply in call.replies.values()]
            wait(replies, timeout=timeout_seconds + GATHER_SECONDS, return_when=FIRST_COMPLETED)
        for rank in [rank for rank, call in self._calls.items() if call.done()]:
            self._take(rank)
        events, self._events = self._events, []
        return events

    def abort(self, uids: Collection[str]) -> None:
        """Ends requests; those that a rank has come out of a later `poll`."""
        chosen = set(uids)
        for request in self._waiting:
            if request.uid in chosen:
                self._events.append(Finished(request.uid, request.attempt, Completion((), (), "abort", ())))
        self._waiting = [request for request in self._waiting if request.uid not in chosen]
        for given, to_abort in zip(self._given, self._to_abort, strict=True):
            to_abort |= given & chosen

    def pause(self) -> None:
        """Stops sampling on all ranks; the next `poll` has the tokens so far of all requests."""
        for rank in list(self._calls):
            self._take(rank)
        self._group.pause()
        for rank, given in enumerate(self._given):
            if given:
                self._calls[rank] = self._group.start_on(rank, "serve", (), (), 0.0, False)
        for rank in list(self._calls):
            self._take(rank)

    def resume(self) -> None:
        """Goes on after `pause`."""
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
            waiting=len(self._waiting) + sum(status.waiting for status in ranks),
            oldest=oldest.oldest,
            oldest_seconds=oldest.oldest_seconds,
        )

    def close(self) -> None:
        """Closes the workers."""
        self._group.close()

    def _take(self, rank: int) -> None:
        """Takes the events of a rank, and waits for them."""
        found = self._calls.pop(rank).result()
        self._given[rank] -= {event.uid for event in found if not isinstance(event, Partial)}
        self._events += found

    def _call(self, timeout_seconds: float) -> None:
        """Asks every rank that has work and is not asked yet."""
        seconds = min(timeout_seconds, GATHER_SECONDS) if self._gathers else timeout_seconds
        blocks = assign(self._waiting, [len(given) for given in self._given], self._most) if self._waiting else {}
        for rank, given in enumerate(self._given):
            requests = blocks.get(rank, [])
            if rank in self._calls or not (requests or given):
                continue
            given |= {request.uid for request in requests}
            aborted, self._to_abort[rank] = tuple(self._to_abort[rank]), set()
            self._calls[rank] = self._group.start_on(rank, "serve", tuple(requests), aborted, seconds, self._gathers)
            taken = {id(request) for request in requests}
            self._waiting = [request for request in self._waiting if id(request) not in taken]


def assign(waiting: Sequence[Request], unfinished: Sequence[int], most: int) -> dict[int, list[Request]]:
    """Requests to give to each rank, by rank: blocks of equal prompts, each to the rank with the fewest `unfinished`.

    No rank has more than `most`, nor more than its even part of all that is unfinished: where all fit together, all
    start at once, as a decode step costs little more for more rows. Otherwise a rank that long responses keep busy
    takes fewer. The longest possible come first."""
    ranks, loads = len(unfinished), list(unfinished)
    if ranks == 1:
        return {0: list(waiting)}
    most = min(most, -(-(len(waiting) + sum(loads)) // ranks))
    given: dict[int, list[Request]] = {}
    for block in blocks_of(waiting, ranks):
        rank = loads.index(min(loads))
        if loads[rank] >= most:
            break
        given.setdefault(rank, []).extend(block)
        loads[rank] += len(block)
    return given


def blocks_of(requests: Sequence[Request], ranks: int) -> list[list[Request]]:
    """Requests that one rank takes together: of one prompt, and no more than leaves every rank some blocks."""
    most = max(1, len(requests) // (BLOCKS_A_RANK * ranks))
    blocks = []
    for _, same in groupby(requests, lambda request: request.identity):
        equal = list(same)
        blocks += [equal[start : start + most] for start in range(0, len(equal), most)]
    return sorted(blocks, key=lambda block: -max(len(r.prompt_ids) + r.params.max_new_tokens for r in block))
