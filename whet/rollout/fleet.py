# SPDX-License-Identifier: Apache-2.0
"""A state machine that distributes tasks over ranks. It takes tasks, events, and changes of ranks; it returns tasks for
ranks and events for the caller.

It has no clock, thread or socket: a driver sends tasks to ranks, and gives up late ranks. Each task has a record
(`Flight`), from which another rank continues if its rank is lost, so the choice of a rank changes no result.

Only events of a task's current attempt (`attempt`), on its rank's current connection (`generation`), count. So events
that come late, twice, or from a rank that was given up change nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, ClassVar

from whet.rollout.episode import joined, part, unfinished
from whet.rollout.protocol import Completion, Event, Failed, Finished, Partial, Request
from whet.types import Failure

RETRIES = 1 << 16  # most attempts on ranks for one attempt of the caller
BLOCKS_A_RANK = 4  # least number of blocks for each rank: larger blocks are split
SHORTEST_PREFIX = 16  # tokens that requests must share for one replica to be better than another
MAX_PREFIXES = 65536  # hashes kept for a rank
AnyTask = Any  # Task or Request: with `uid` and `attempt`
AnyEvent = Any  # event of a task: Done or rollout.protocol.Event


@dataclass(frozen=True)
class Give:
    """Tasks to send over one connection of a rank, and the uids of tasks that the rank must end first."""

    rank: int
    generation: int
    tasks: tuple[AnyTask, ...]
    ended: tuple[str, ...] = ()


@dataclass(frozen=True)
class FleetTask:
    """A task that is no Request, such as an episode or a batch to score; or a later part of such a task."""

    uid: str
    what: Any
    attempt: int = 0
    size: int = 1  # in the load of a rank


@dataclass(frozen=True)
class Done:
    """The result of a task or of one part of it; with `is_last` false, a message before the result."""

    uid: str
    what: Any
    attempt: int
    is_last: bool = True


@dataclass
class Flight:
    """An unfinished task, with all data that another rank needs to continue it. A rank gets one part at a time, after
    the result of the part before. A new rank gets all parts again, but the caller gets no result twice."""

    task: AnyTask  # of the caller
    rank: int | None = None  # the rank that has the task; None while it waits
    retries: int = 0
    is_aborted: bool = False  # by the caller
    is_awaited: bool = False  # whether its rank still computes a part
    parts: list[AnyTask] = field(default_factory=list)  # later parts, after `task`
    num_given: int = 0  # parts that its rank got
    num_told: int = 0  # results that the caller got
    most_retries: ClassVar[int] = sys.maxsize

    @property
    def is_due(self) -> bool:
        """Tells whether the task's rank may get the next part."""
        return not self.is_awaited and self.num_given <= len(self.parts)

    @property
    def attempt(self) -> int:
        """The number of the attempt and of its part, over all ranks. Events with another number are ignored."""
        return int(self.task.attempt) * RETRIES + self.retries + self.num_given

    def given(self) -> AnyTask:
        """Returns the next part of the task, to be sent to its rank."""
        part, self.is_awaited = [self.task, *self.parts][self.num_given], True
        self.num_given += 1
        return replace(part, attempt=self.attempt)

    def hear(self, event: AnyEvent) -> list[AnyEvent]:
        """Records an event of the current attempt.  Returns the events to pass to the caller."""
        self.is_awaited &= not event.is_last
        is_new = not event.is_last or self.num_given > self.num_told
        self.num_told += event.is_last and is_new
        return [event] if is_new else []

    def retry(self) -> None:
        """Puts the task back into the queue, because its rank is lost."""
        self.rank, self.retries, self.num_given, self.is_awaited = None, self.retries + 1, 0, False

    def last(self) -> list[AnyEvent]:
        """Returns the final events for the caller of a task that was aborted without a rank, or lost too often."""
        return []


@dataclass
class Rank:
    """A connected rank."""

    generation: int  # grows from one connection to the next
    version: int | None = None  # of its weights
    loading: int | None = None  # the version that it is loading, until `on_loaded` or the loss of the rank
    given: dict[str, Flight] = field(default_factory=dict)  # its unfinished tasks by uid, in their order
    ended: list[str] = field(default_factory=list)  # uids of tasks that it must end
    prefixes: set[int] = field(default_factory=set)  # hashes of prefixes that it read with the newest weights

    @property
    def is_ready(self) -> bool:
        """Tells whether the rank can take tasks."""
        return self.version is not None and self.loading is None


@dataclass
class Fleet:
    """Distributes tasks over several ranks, at most `most` tasks a rank.

    A rank gets tasks once it has the newest weights; a fleet without weights stays at version 0. Tasks of a lost rank
    go to other ranks, ahead of waiting tasks, with their `Flight` records. Methods that end tasks return the events for
    the caller, with the attempt of the caller's task."""

    most: int = sys.maxsize  # unfinished tasks of a rank
    version: int = 0  # of the newest weights
    restarts: int | None = None  # most replacements of a rank's process; None: never replaced, other ranks continue
    has_parts: bool = False  # a task stays with its rank until it is aborted
    flight: Callable[[AnyTask], Flight] = Flight
    ranks: dict[int, Rank] = field(default_factory=dict)
    flights: dict[str, Flight] = field(default_factory=dict)  # by uid
    waiting: dict[str, Flight] = field(default_factory=dict)  # flights without a rank, in their order
    starts: dict[int, int] = field(default_factory=dict)  # of processes, by rank
    is_paused: bool = False  # waiting tasks are not given to ranks
    end: Exception | None = None  # the error that ended it
    generations: int = 0  # number of connections so far, also before a restart of the trainer

    # ---- tasks

    def submit(self, task: AnyTask) -> None:
        """Accepts a task. A task with the uid and attempt of an unfinished one is ignored or, with `has_parts`, is its
        next part. A later attempt replaces an earlier one.  Raises: the error that `on_death` has raised, if any."""
        if self.end is not None:
            raise self.end
        flight = self.flights.get(task.uid)
        if flight is None or flight.task.attempt < task.attempt:
            self.abort([task.uid], silently=True)
            self.flights[task.uid] = self.waiting[task.uid] = self.flight(task)
        elif self.has_parts:
            flight.parts.append(task)

    def abort(self, uids: Collection[str], *, silently: bool = False) -> list[AnyEvent]:
        """Ends tasks. Tasks on a rank end with later events of it; with `silently` all end now, without events."""
        told = list[AnyEvent]()
        for flight in [self.flights[uid] for uid in uids if uid in self.flights]:
            flight.is_aborted = True
            if flight.rank is not None:
                self.ranks[flight.rank].ended.append(flight.task.uid)
            elif not silently:
                told += flight.last()
            if flight.rank is None or silently:
                self._end(flight)
        return told

    def give(self, reachable: Collection[int] | None = None) -> list[Give]:
        """Gives waiting tasks to the `reachable` ranks, by default all. Tasks assigned to other ranks keep waiting."""
        ready = [rank for rank, each in self.ranks.items() if each.is_ready]
        shares = self.shares(ready) if self.waiting and ready and not self.is_paused else {}
        gives = list[Give]()
        for rank in [rank for rank in self.ranks if reachable is None or rank in reachable]:
            each = self.ranks[rank]
            for flight in shares.get(rank, ()):
                flight.rank, each.given[flight.task.uid] = rank, self.waiting.pop(flight.task.uid)
            tasks = tuple(flight.given() for flight in each.given.values() if flight.is_due)
            if tasks or each.ended:
                gives.append(Give(rank, each.generation, tasks, tuple(each.ended)))
                each.ended = []
        return gives

    def shares(self, ready: Sequence[int]) -> Mapping[int, Sequence[Flight]]:
        """Assigns each waiting task to the rank with the smallest load: the sum of `size` of its tasks."""
        loads = {rank: sum(each.task.size for each in self.ranks[rank].given.values()) for rank in ready}
        found: dict[int, list[Flight]] = {rank: [] for rank in ready}
        for flight in self.waiting.values():
            rank = min(ready, key=loads.__getitem__)
            loads[rank] += flight.task.size
            found[rank].append(flight)
        return found

    def on_events(self, rank: int, generation: int, events: Iterable[AnyEvent]) -> list[AnyEvent]:
        """Records events of a rank's tasks.  Returns the events to pass to the caller."""
        told = list[AnyEvent]()
        for event in events if self._is_current(rank, generation) else ():
            flight = self.flights.get(event.uid)
            if flight is not None and flight.rank == rank and flight.attempt == event.attempt:
                told += flight.hear(event)
                if not flight.is_awaited and not self.has_parts:
                    self._end(flight)
        return told

    def is_asked(self, rank: int) -> bool:
        """Tells whether any task on the rank still awaits an event."""
        return any(each.is_awaited for each in self.ranks[rank].given.values())

    # ---- ranks

    def on_join(self, rank: int, version: int | None = None) -> list[AnyEvent]:
        """Records that a rank has connected, for the first time or again, with weights of a `version`. It gets tasks
        once it has the newest weights."""
        told = self.on_lost(rank, self.ranks[rank].generation) if rank in self.ranks else []
        self.generations += 1
        loading = None if version == self.version else self.version
        self.ranks[rank] = Rank(self.generations, version, loading)
        return told

    def on_lost(self, rank: int, generation: int) -> list[AnyEvent]:
        """Records that the connection to a rank is lost or was given up."""
        if not self._is_current(rank, generation):
            return []
        lost, told = self.ranks.pop(rank), list[AnyEvent]()
        self.waiting = lost.given | self.waiting
        for flight in lost.given.values():
            flight.retry()
            if flight.is_aborted or flight.retries > flight.most_retries:
                told += flight.last()
                self._end(flight)
        return told

    def on_death(self, rank: int, cause: Exception, *, is_last: bool) -> int:
        """Records that the process of a lost rank has ended. `is_last` means that no other rank is about to join.
        Returns the number of the replacement process to start, or 0.  Raises: `cause` if no replacement is allowed or
        no rank is left."""
        starts = self.starts.get(rank, 0)
        if (is_last and not self.ranks) or starts == self.restarts:
            self.end = cause
            raise cause
        self.starts[rank] = starts + (self.restarts is not None)
        return self.starts[rank]

    # ---- weights

    def on_weights(self, version: int) -> None:
        """Records a new weight version. Each rank must load it before it gets more tasks."""
        self.version = version
        for each in self.ranks.values():
            each.loading = version if each.loading is None else each.loading
            each.prefixes = set()

    def on_loaded(self, rank: int, generation: int, version: int) -> None:
        """Records that a rank has loaded the weights of `version`."""
        if self._is_current(rank, generation) and self.ranks[rank].loading == version:
            self.ranks[rank].version = version
            self.ranks[rank].loading = self.version if version < self.version else None

    @property
    def is_synced(self) -> bool:
        """Tells whether every rank that has weights has the newest weights."""
        return all(each.version in (None, self.version) for each in self.ranks.values())

    def _is_current(self, rank: int, generation: int) -> bool:
        return rank in self.ranks and self.ranks[rank].generation == generation

    def _end(self, flight: Flight) -> None:
        uid = flight.task.uid
        del self.flights[uid]
        del (self.waiting if flight.rank is None else self.ranks[flight.rank].given)[uid]


@dataclass
class PartlySampled(Flight):
    """An unfinished request. If its rank is lost, another rank continues after the tokens received so far."""

    task: Request
    so_far: Completion | None = None  # tokens received after the tokens of `task`
    kept: int = 0  # number of these tokens that lost attempts sampled
    most_retries: ClassVar[int] = 16  # the request itself may crash replicas

    def given(self) -> Request:
        """Returns the request of the current attempt."""
        self.is_awaited = True
        if self.attempt == self.task.attempt:
            return self.task
        kept = () if self.so_far is None else self.so_far.token_ids[: self.kept]
        return replace(self.task, attempt=self.attempt, sampled_ids=self.task.sampled_ids + kept)

    def note(self, partial: Partial) -> Completion | None:
        """Records tokens of the current attempt. Ignores `partial` if tokens before it are missing: they come again, or
        with the end of the request.  Returns the new tokens; None if there are none."""
        held = len(self.task.sampled_ids) + (0 if self.so_far is None else len(self.so_far.token_ids))
        tokens, log_probs, versions = partial.token_ids, partial.log_probs, partial.versions
        chunk = Completion(tokens, log_probs, "abort", versions, None, partial.likeliest, partial.routed)
        new = part(chunk, held - partial.offset, len(chunk.token_ids)) if partial.offset <= held else None
        if new is not None:
            self.so_far = new if self.so_far is None else joined(self.so_far, new)
        return new

    def hear(self, event: Event) -> list[Event]:
        """Converts a rank's event for the caller: adds the tokens of all earlier attempts on ranks. A Partial of a
        streaming request has only the new tokens."""
        uid, attempt, offset = self.task.uid, self.task.attempt, len(self.task.sampled_ids)
        if isinstance(event, Partial):
            new = self.note(event)
            told = new if self.task.streams else self.so_far
            if told is None or self.so_far is None:
                return []
            return [told.as_partial(uid, attempt, offset + len(self.so_far.token_ids) - len(told.token_ids))]
        self.is_awaited = False
        if isinstance(event, Failed):
            return [Failed(uid, attempt, event.failure)]
        kept = self.so_far and part(self.so_far, 0, self.kept)
        return [Finished(uid, attempt, event.completion if kept is None else joined(kept, event.completion))]

    def retry(self) -> None:
        """Requeues the request with the tokens sampled so far, except a last token that may have ended the response."""
        super().retry()
        self.so_far = self.so_far and unfinished(self.so_far, self.task)
        self.kept = 0 if self.so_far is None else len(self.so_far.token_ids)

    def last(self) -> list[Event]:
        """Returns a Failed event if the request was lost too often; otherwise Finished with its tokens so far."""
        uid, attempt = self.task.uid, self.task.attempt
        if self.retries <= self.most_retries:
            known = self.so_far or Completion((), (), "abort", ())
            return [Finished(uid, attempt, replace(known, stop=None))]
        why = (
            f"{self.retries} replicas were lost with this request, which is given up after {self.most_retries}; the "
            "log of a lost replica shows whether the request was the cause"
        )
        return [Failed(uid, attempt, Failure("engine", why))]


@dataclass
class Router(Fleet):
    """Distributes requests over the rollout ranks."""

    flight: Callable[[AnyTask], Flight] = PartlySampled

    def shares(self, ready: Sequence[int]) -> Mapping[int, Sequence[Flight]]:
        """Assigns requests to ranks with `assign`."""
        requests: list[Request] = [each.task for each in self.waiting.values()]
        loads = {rank: len(self.ranks[rank].given) for rank in ready}
        if len(ready) == 1:  # more ranks may join
            requests = requests[: max(0, self.most - loads[ready[0]])]
        found = assign(requests, loads, self.most, self._home) if requests else {}
        return {rank: [self.flights[each.uid] for each in found[rank]] for rank in ready if rank in found}

    def give(self, reachable: Collection[int] | None = None) -> list[Give]:
        """Gives requests like `Fleet.give`. Records the prompts that a rank reads, for requests with equal prefixes."""
        gives = super().give(reachable)
        for each in gives if len(self.ranks) > 1 else ():
            known = self.ranks[each.rank].prefixes
            if len(known) > MAX_PREFIXES:
                known.clear()
            for token_ids, _ in groupby(each.tasks, lambda request: request.prompt_ids):
                known.update(_prefixes(token_ids))
        return gives

    def _home(self, request: Request) -> int | None:
        """Returns the rank that has read the longest prefix of a request; None if no rank has read one."""
        known = [(rank, each.prefixes) for rank, each in self.ranks.items() if each.prefixes]
        prefixes = _prefixes(request.prompt_ids) if known else ()
        return next((rank for prefix in prefixes for rank, read in known if prefix in read), None)


def assign(
    waiting: Sequence[Request],
    unfinished: Mapping[int, int],
    most: int,
    home: Callable[[Request], int | None] = lambda request: None,
) -> dict[int, list[Request]]:
    """Assigns requests to ranks. A block of requests with equal prompts goes to the rank with the fewest `unfinished`.

    No rank gets more than `most`, nor more than an even share of all unfinished requests. If all fit, all start at
    once, as a decode step is hardly slower with more rows. Otherwise a rank that long responses keep busy gets fewer.
    The longest possible sequences come first. `home` returns the rank that has read a request's prefix: this rank gets
    the block unless it would exceed its even share."""
    loads = dict(unfinished)
    if len(loads) == 1:
        return {rank: list(waiting) for rank in loads}
    even = min(most, -(-(len(waiting) + sum(loads.values())) // len(loads)))
    given: dict[int, list[Request]] = {}
    for block in blocks_of(waiting, len(loads)):
        rank, known = min(loads, key=loads.__getitem__), home(block[0])
        if loads[rank] >= even:
            break
        if known in loads and loads[known] + len(block) <= even:
            rank = known
        given.setdefault(rank, []).extend(taken := block[: most - loads[rank]])  # the rest of a block waits
        loads[rank] += len(taken)
    return given


def blocks_of(requests: Sequence[Request], ranks: int) -> list[list[Request]]:
    """Groups requests with equal prompts into blocks for one rank; splits large ones, so that all ranks get some."""
    most = max(1, len(requests) // (BLOCKS_A_RANK * ranks))
    blocks = []
    for _, same in groupby(requests, lambda request: request.identity):
        equal = list(same)
        blocks += [equal[start : start + most] for start in range(0, len(equal), most)]
    return sorted(blocks, key=lambda block: -max(len(r.prompt_ids) + r.params.max_new_tokens for r in block))


def _prefixes(token_ids: tuple[int, ...]) -> list[int]:
    """Hashes of all ids and of the first 16, 32, 64, ... ids, the longest first. Media are ignored: if only media
    differ, any rank is equally good."""
    lengths = [SHORTEST_PREFIX << n for n in range(32) if SHORTEST_PREFIX << n < len(token_ids)]
    return [hash(token_ids[:length]) for length in (len(token_ids), *reversed(lengths))]
