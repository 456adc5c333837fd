# SPDX-License-Identifier: Apache-2.0
"""Several replicas as one engine, as a state machine: requests, events and news of replicas go in; commands come out.

It has no clock, thread or socket: a driver carries the commands out, and gives up replicas that are late. The choice of
a replica changes no token, as random draws are keyed by request and position.

An event is heard only from the attempt of its request that runs (`attempt`), on the connection that its replica has now
(`generation`). So whatever comes late, twice, or from a replica that was given up changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from whet.rollout.episode import joined, part, unfinished
from whet.rollout.protocol import Completion, Event, Failed, Finished, Partial, Request
from whet.types import Failure

BLOCKS_A_RANK = 4  # at least, of equal prompts: larger ones are split, so that every rank has its part
RETRIES = 1 << 16  # an attempt of the caller has so many attempts on replicas
SHORTEST_PREFIX = 16  # tokens that requests must share for one replica to be better than another
MAX_HOMES = 65536  # prefixes that are remembered
Generation = tuple[int, int]  # incarnation of the trainer, and a number within it


@dataclass(frozen=True)
class Give:
    """Submit requests to a replica."""

    replica: int
    generation: Generation
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Abort:
    """End requests of a replica."""

    replica: int
    generation: Generation
    uids: tuple[str, ...]


@dataclass(frozen=True)
class Load:
    """Fill a replica with weights, and tell `on_loaded`, or `on_lost` where they did not arrive whole. What runs there
    goes on under them; what runs there for an earlier generation is forgotten."""

    replica: int
    generation: Generation
    version: int


@dataclass(frozen=True)
class Pause:
    """Stop the sampling of a replica; its events bring the tokens so far."""

    replica: int
    generation: Generation


@dataclass(frozen=True)
class Resume:
    """Let a replica go on after a Pause."""

    replica: int
    generation: Generation


@dataclass(frozen=True)
class Tell:
    """Show an event to the caller, under the attempt of its request."""

    event: Event


@dataclass(frozen=True)
class Synced:
    """Go on with the newest weights: every replica that samples has them."""

    version: int


Command = Give | Abort | Load | Pause | Resume | Tell | Synced


@dataclass
class Flight:
    """A request that is not finished."""

    request: Request  # of the caller
    replica: int | None = None  # that runs it; None while it waits
    retries: int = 0
    kept: Completion | None = None  # tokens of attempts that were lost, behind those of `request`
    noted: Completion | None = None  # tokens of the attempt that runs, as far as they are known
    is_aborted: bool = False  # by the caller

    @property
    def attempt(self) -> int:
        """The number of the attempt among all of the request on any replica."""
        return self.request.attempt * RETRIES + self.retries

    @property
    def given(self) -> Request:
        """The request of the attempt."""
        if self.attempt == self.request.attempt:
            return self.request
        kept = () if self.kept is None else self.kept.token_ids
        return replace(self.request, attempt=self.attempt, sampled_ids=self.request.sampled_ids + kept)

    @property
    def so_far(self) -> Completion | None:
        """The tokens that are known, behind those of the caller's request."""
        if self.kept is None or self.noted is None:
            return self.noted or self.kept
        return joined(self.kept, self.noted)

    def note(self, partial: Partial) -> Completion | None:
        """Notes tokens of the attempt that runs; those behind a gap come again later, or with its end.  Returns those
        that are new; None without any."""
        begin = len(self.request.sampled_ids) + (0 if self.kept is None else len(self.kept.token_ids))
        held = begin + (0 if self.noted is None else len(self.noted.token_ids))
        chunk = Completion(partial.token_ids, partial.log_probs, "abort", partial.versions, likeliest=partial.likeliest)
        new = part(chunk, held - partial.offset, len(chunk.token_ids)) if partial.offset <= held else None
        if new is not None:
            self.noted = new if self.noted is None else joined(self.noted, new)
        return new

    def retry(self) -> None:
        """Goes on where the attempt got to. A token that may have ended the response is sampled again."""
        so_far, self.noted = self.so_far, None
        self.kept = so_far and unfinished(so_far, self.request)
        self.replica, self.retries = None, self.retries + 1


@dataclass
class Replica:
    """A replica that is connected."""

    generation: Generation
    version: int | None = None  # of its weights
    loading: int | None = None  # the version that is on its way to it
    given: dict[str, None] = field(default_factory=dict)  # uids of its unfinished requests, in their order

    @property
    def is_ready(self) -> bool:
        """Tells whether it takes requests."""
        return self.version is not None and self.loading is None


@dataclass
class Router:
    """Requests for several replicas, each of which gets no more while it has `most`.

    A replica gets the first request when it has the newest weights. Requests of a replica that is lost go to the
    others, in front of those that wait, with all tokens that were heard of. A request that was lost with `most_retries`
    replicas and one more fails: it may be what ends them.
    """

    most: int  # unfinished requests of a replica
    version: int = 0  # of the newest weights
    incarnation: int = 0  # of the trainer: generations of an earlier one are not heard
    most_retries: int = 16  # of a request
    replicas: dict[int, Replica] = field(default_factory=dict)
    flights: dict[str, Flight] = field(default_factory=dict)  # by uid
    waiting: dict[str, None] = field(default_factory=dict)  # uids that no replica has, in their order
    is_paused: bool = False
    _synced: int = 0
    _generations: int = 0
    _homes: dict[int, int] = field(default_factory=dict)  # replica that read a prefix last, by its hash

    # ---- requests

    def submit(self, request: Request) -> list[Command]:
        """Takes a request. One that is there already, by uid and attempt, is not taken twice; a later attempt
        replaces an earlier one."""
        before = self.flights.get(request.uid)
        if before is not None and before.request.attempt >= request.attempt:
            return []
        commands = list[Command]()
        if before is not None:
            commands += self._abort_on_replicas([before])
            self._end(before)
        self.flights[request.uid] = Flight(request)
        self.waiting[request.uid] = None
        return commands

    def abort(self, uids: Collection[str]) -> list[Command]:
        """Ends requests; those that a replica has end with its event."""
        chosen = [self.flights[uid] for uid in uids if uid in self.flights]
        for flight in chosen:
            flight.is_aborted = True
        commands = self._abort_on_replicas(chosen)
        return commands + [self._aborted(flight) for flight in chosen if flight.replica is None]

    def give(self, reachable: Collection[int] | None = None) -> list[Command]:
        """Gives waiting requests to the replicas that are `reachable`, by default all; others leave their share."""
        ready = [number for number, each in self.replicas.items() if each.is_ready]
        if not self.waiting or not ready or self.is_paused:
            return []
        requests = [self.flights[uid].given for uid in self.waiting]
        loads = [len(self.replicas[number].given) for number in ready]
        if len(ready) == 1:  # others may come
            requests = requests[: max(0, self.most - loads[0])]
        shares = assign(requests, loads, self.most, self._home(ready)) if requests else {}
        commands = list[Command]()
        for place, share in sorted(shares.items()):
            number = ready[place]
            if reachable is not None and number not in reachable:
                continue
            for request in share:
                self.flights[request.uid].replica = number
                self.replicas[number].given[request.uid] = None
            self._remember(share, number)
            commands.append(Give(number, self.replicas[number].generation, tuple(share)))
        self.waiting = {uid: None for uid in self.waiting if self.flights[uid].replica is None}
        return commands

    def on_events(self, replica: int, generation: Generation, events: Iterable[Event]) -> list[Command]:
        """Hears what a replica says of its requests."""
        commands = list[Command]()
        for event in events if self._is_current(replica, generation) else ():
            flight = self.flights.get(event.uid)
            if flight is None or flight.replica != replica or flight.attempt != event.attempt:
                continue
            if isinstance(event, Partial):
                commands += self._noted(flight, event)
                continue
            commands += self._told(flight, event)
            self._end(flight)
        return commands

    # ---- replicas

    def on_join(self, replica: int) -> list[Command]:
        """Notes that a replica is connected, perhaps again; it gets requests once it has the newest weights."""
        before = self.replicas.get(replica)
        commands = [] if before is None else self.on_lost(replica, before.generation)
        joined_ = self.replicas[replica] = Replica(self._next_generation())
        return [*commands, *self._load(replica, joined_)]

    def on_lost(self, replica: int, generation: Generation) -> list[Command]:
        """Notes that a replica is gone, or was given up."""
        if not self._is_current(replica, generation):
            return []
        lost = self.replicas.pop(replica)
        self._homes = {prefix: home for prefix, home in self._homes.items() if home != replica}
        return [*self._release(lost), *self._sync()]

    # ---- weights

    def on_weights(self, version: int) -> list[Command]:
        """Notes new weights, which every replica loads before it gets more requests."""
        self.version = version
        self._homes.clear()  # keys and values of older weights are of no use
        idle = [(number, each) for number, each in self.replicas.items() if each.loading is None]
        return [command for number, each in idle for command in self._load(number, each)] + self._sync()

    def on_loaded(self, replica: int, generation: Generation, version: int) -> list[Command]:
        """Notes that a replica samples with these weights."""
        if not self._is_current(replica, generation) or self.replicas[replica].loading != version:
            return []
        each = self.replicas[replica]
        each.version, each.loading = version, None
        return self._load(replica, each) if version < self.version else self._sync()

    def pause(self) -> list[Command]:
        """Stops all sampling."""
        self.is_paused = True
        return [Pause(number, each.generation) for number, each in self.replicas.items()]

    def resume(self) -> list[Command]:
        """Goes on after `pause`."""
        self.is_paused = False
        return [Resume(number, each.generation) for number, each in self.replicas.items()]

    def _is_current(self, replica: int, generation: Generation) -> bool:
        return replica in self.replicas and self.replicas[replica].generation == generation

    def _next_generation(self) -> Generation:
        self._generations += 1
        return self.incarnation, self._generations

    def _load(self, number: int, each: Replica) -> list[Command]:
        each.loading = self.version
        return [Load(number, each.generation, self.version)]

    def _sync(self) -> list[Command]:
        """Says once of every version that all that sample have it."""
        sampling = [each for each in self.replicas.values() if each.version is not None]
        if self._synced == self.version or any(each.version != self.version for each in sampling):
            return []
        self._synced = self.version
        return [Synced(self.version)]

    def _release(self, each: Replica) -> list[Command]:
        """Takes the requests of a replica back."""
        flights = [self.flights[uid] for uid in each.given]
        each.given = {}
        for flight in flights:
            flight.retry()
        self.waiting = {flight.request.uid: None for flight in flights} | self.waiting
        over = [self._given_up(flight) for flight in flights if flight.retries > self.most_retries]
        return over + [self._aborted(flight) for flight in flights if flight.is_aborted]

    def _abort_on_replicas(self, flights: Sequence[Flight]) -> list[Command]:
        uids: dict[int, list[str]] = {}
        for flight in flights:
            if flight.replica is not None:
                uids.setdefault(flight.replica, []).append(flight.request.uid)
        return [Abort(number, self.replicas[number].generation, tuple(each)) for number, each in uids.items()]

    def _aborted(self, flight: Flight) -> Command:
        """Ends a request that no replica has."""
        self._end(flight)
        uid, attempt = flight.request.uid, flight.request.attempt
        nothing = Completion((), (), "abort", ())
        return Tell(Finished(uid, attempt, nothing if flight.kept is None else replace(flight.kept, stop=None)))

    def _given_up(self, flight: Flight) -> Command:
        """Fails a request that was lost too often."""
        self._end(flight)
        flight.is_aborted = False
        why = (
            f"{flight.retries} replicas were lost with this request, at most {self.most_retries} are replaced; the log "
            "of a replica says whether the request ended it"
        )
        return Tell(Failed(flight.request.uid, flight.request.attempt, Failure("engine", why)))

    def _end(self, flight: Flight) -> None:
        uid = flight.request.uid
        del self.flights[uid]
        if flight.replica is None:
            del self.waiting[uid]
        else:
            del self.replicas[flight.replica].given[uid]
        if not self.flights:
            self._homes.clear()

    def _noted(self, flight: Flight, partial: Partial) -> list[Command]:
        """Tokens as the caller knows the request: all so far, or where it streams those that are new."""
        new, request, so_far = flight.note(partial), flight.request, flight.so_far
        if so_far is None or (request.streams and new is None):
            return []
        offset = len(request.sampled_ids)
        if request.streams and new is not None:
            offset, so_far = offset + len(so_far.token_ids) - len(new.token_ids), new
        where = request.uid, request.attempt, offset
        return [Tell(so_far.as_partial(*where))]

    def _told(self, flight: Flight, event: Finished | Failed) -> list[Command]:
        """The end as the caller knows the request: tokens of all attempts, under the attempt of the caller."""
        uid, attempt = flight.request.uid, flight.request.attempt
        if isinstance(event, Failed):
            return [Tell(Failed(uid, attempt, event.failure))]
        whole = event.completion if flight.kept is None else joined(flight.kept, event.completion)
        return [Tell(Finished(uid, attempt, whole))]

    def _home(self, ready: Sequence[int]) -> Callable[[Request], int | None]:
        """A function from a request to the place in `ready` of the replica that read the longest prefix of it."""
        places = {number: place for place, number in enumerate(ready)}

        def home(request: Request) -> int | None:
            found = (self._homes.get(prefix) for prefix in _prefixes(request.prompt_ids)) if self._homes else ()
            return next((places.get(number) for number in found if number is not None), None)

        return home

    def _remember(self, requests: Sequence[Request], replica: int) -> None:
        """Notes where prompts are read: equal ones follow each other."""
        if len(self.replicas) == 1:
            return
        if len(self._homes) > MAX_HOMES:
            self._homes.clear()
        for token_ids, _ in groupby(requests, lambda request: request.prompt_ids):
            self._homes |= dict.fromkeys(_prefixes(token_ids), replica)


def assign(
    waiting: Sequence[Request],
    unfinished: Sequence[int],
    most: int,
    home: Callable[[Request], int | None] = lambda request: None,
) -> dict[int, list[Request]]:
    """Requests to give to each rank, by rank: blocks of equal prompts, each to the rank with the fewest `unfinished`.

    No rank has more than `most`, nor more than its even part of all that is unfinished: where all fit together, all
    start at once, as a decode step costs little more for more rows. Otherwise a rank that long responses keep busy
    takes fewer. The longest possible come first. A block goes to its `home`, a rank that read its prefix, as long as
    that has its even part at most."""
    ranks, loads = len(unfinished), list(unfinished)
    if ranks == 1:
        return {0: list(waiting)}
    most = min(most, -(-(len(waiting) + sum(loads)) // ranks))
    given: dict[int, list[Request]] = {}
    for block in blocks_of(waiting, ranks):
        rank = loads.index(min(loads))
        if loads[rank] >= most:
            break
        known = home(block[0])
        if known is not None and loads[known] + len(block) <= most:
            rank = known
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


def _prefixes(token_ids: tuple[int, ...]) -> list[int]:
    """Hashes of the ids and of their beginnings of 16, 32, 64, ... ids, the longest first. Media are left out: where
    they alone differ, a replica is chosen that is as good as any."""
    lengths = [len(token_ids)]
    length = SHORTEST_PREFIX
    while length < len(token_ids):
        lengths.append(length)
        length *= 2
    return [hash(token_ids[:length]) for length in sorted(lengths, reverse=True)]
