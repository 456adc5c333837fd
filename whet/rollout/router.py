# SPDX-License-Identifier: Apache-2.0
"""The fleet of a rollout: what is known of a request's tokens, and which rank samples it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import ClassVar

from whet.rollout.episode import joined, part, unfinished
from whet.rollout.fleet import AnyEvent, AnyTask, Fleet, Flight, Generation, Give
from whet.rollout.protocol import Completion, Event, Failed, Finished, Partial, Request
from whet.types import Failure

BLOCKS_A_RANK = 4  # at least, of equal prompts: larger ones are split, so that every rank has its part
SHORTEST_PREFIX = 16  # tokens that requests must share for one replica to be better than another
MAX_HOMES = 65536  # prefixes that are remembered


@dataclass
class Sampled(Flight):
    """A request that is not finished. Another rank goes on behind the tokens that were heard of."""

    task: Request
    so_far: Completion | None = None  # tokens that are known, behind those of `task`
    kept: int = 0  # of them, those of attempts that were lost
    most_retries: ClassVar[int] = 16  # it may be what ends replicas

    def given(self) -> Request:
        """Returns the request of the attempt."""
        self.is_awaited = True
        if self.attempt == self.task.attempt:
            return self.task
        kept = () if self.so_far is None else self.so_far.token_ids[: self.kept]
        return replace(self.task, attempt=self.attempt, sampled_ids=self.task.sampled_ids + kept)

    def note(self, partial: Partial) -> Completion | None:
        """Notes tokens of the attempt that runs; those behind a gap come again later, or with its end.  Returns those
        that are new; None without any."""
        held = len(self.task.sampled_ids) + (0 if self.so_far is None else len(self.so_far.token_ids))
        sampled, told = (partial.token_ids, partial.log_probs), (None, partial.likeliest, partial.routed)
        chunk = Completion(*sampled, "abort", partial.versions, *told)
        new = part(chunk, held - partial.offset, len(chunk.token_ids)) if partial.offset <= held else None
        if new is not None:
            self.so_far = new if self.so_far is None else joined(self.so_far, new)
        return new

    def hear(self, event: Event) -> list[Event]:
        """Returns an event as the caller knows the request: its tokens of all attempts; where it streams, those that
        are new until it ends."""
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
        """Goes on where the attempt got to. A token that may have ended the response is sampled again."""
        super().retry()
        self.so_far = self.so_far and unfinished(self.so_far, self.task)
        self.kept = 0 if self.so_far is None else len(self.so_far.token_ids)

    def last(self) -> list[Event]:
        """Returns a failure where it was lost too often, else the tokens that are known."""
        uid, attempt = self.task.uid, self.task.attempt
        if self.retries <= self.most_retries:
            known = self.so_far or Completion((), (), "abort", ())
            return [Finished(uid, attempt, replace(known, stop=None))]
        why = (
            f"{self.retries} replicas were lost with this request, at most {self.most_retries} are replaced; the log "
            "of a replica says whether the request ended it"
        )
        return [Failed(uid, attempt, Failure("engine", why))]


@dataclass
class Router(Fleet):
    """Requests for the ranks of a rollout."""

    flight: Callable[[AnyTask], Flight] = Sampled
    _homes: dict[int, int] = field(default_factory=dict)  # rank that read a prefix last, by its hash

    def shares(self, ready: Sequence[int]) -> Mapping[int, Sequence[Flight]]:
        """Chooses ranks as `assign` does."""
        requests: list[Request] = [self.flights[uid].task for uid in self.waiting]
        loads = {rank: len(self.ranks[rank].given) for rank in ready}
        if len(ready) == 1:  # others may come
            requests = requests[: max(0, self.most - loads[ready[0]])]
        found = assign(requests, loads, self.most, self._home) if requests else {}
        return {rank: [self.flights[each.uid] for each in found[rank]] for rank in ready if rank in found}

    def give(self, reachable: Collection[int] | None = None) -> list[Give]:
        """Notes also where prompts are read: equal ones follow each other."""
        gives = super().give(reachable)
        for each in gives if len(self.ranks) > 1 else ():
            if len(self._homes) > MAX_HOMES:
                self._homes.clear()
            for token_ids, _ in groupby(each.tasks, lambda request: request.prompt_ids):
                self._homes |= dict.fromkeys(_prefixes(token_ids), each.rank)
        return gives

    def on_lost(self, rank: int, generation: Generation) -> list[AnyEvent]:
        """Forgets also which prompts it read."""
        if self._is_current(rank, generation):
            self._homes = {prefix: home for prefix, home in self._homes.items() if home != rank}
        return super().on_lost(rank, generation)

    def on_weights(self, version: int) -> None:
        """Forgets also where prompts were read: keys and values of older weights are of no use."""
        self._homes.clear()
        super().on_weights(version)

    def _end(self, flight: Flight) -> None:
        super()._end(flight)
        if not self.flights:
            self._homes.clear()

    def _home(self, request: Request) -> int | None:
        """Returns the rank that read the longest prefix of a request."""
        found = map(self._homes.get, _prefixes(request.prompt_ids)) if self._homes else ()
        return next((rank for rank in found if rank is not None), None)


def assign(
    waiting: Sequence[Request],
    unfinished: Mapping[int, int],
    most: int,
    home: Callable[[Request], int | None] = lambda request: None,
) -> dict[int, list[Request]]:
    """Requests to give to each rank, by rank: blocks of equal prompts, each to the rank with the fewest `unfinished`.

    No rank has more than `most`, nor more than its even part of all that is unfinished: where all fit together, all
    start at once, as a decode step costs little more for more rows. Otherwise a rank that long responses keep busy
    takes fewer. The longest possible come first. A block goes to its `home`, a rank that read its prefix, as long as
    that has its even part at most."""
    loads = dict(unfinished)
    if len(loads) == 1:
        return {rank: list(waiting) for rank in loads}
    most = min(most, -(-(len(waiting) + sum(loads.values())) // len(loads)))
    given: dict[int, list[Request]] = {}
    for block in blocks_of(waiting, len(loads)):
        rank, known = min(loads, key=loads.__getitem__), home(block[0])
        if loads[rank] >= most:
            break
        if known in loads and loads[known] + len(block) <= most:
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
    lengths = [SHORTEST_PREFIX << n for n in range(32) if SHORTEST_PREFIX << n < len(token_ids)]
    return [hash(token_ids[:length]) for length in (len(token_ids), *reversed(lengths))]
