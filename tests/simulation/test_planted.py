# SPDX-License-Identifier: Apache-2.0
"""Each invariant fires: a bug is planted in the real machines, and found with every other check off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.simulation import actors
from tests.simulation.invariants import ALL, InvariantError, named
from tests.simulation.plan import Plan
from tests.simulation.world import World
from whet.rollout import episode, fleet as fleeting, snapshot as saving
from whet.rollout.driver import Driver
from whet.rollout.episode import Command, Episode, Step
from whet.rollout.fleet import PartlySampled, Router
from whet.rollout.flow import Flow
from whet.rollout.protocol import Completion, Event, Finished, Partial, Request
from whet.types import Group

SEEDS = 400
Patch = tuple[Any, str, Any]
BUGS: dict[str, tuple[int, Callable[[], list[Patch]]]] = {}


def bug(number: int) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
    """Registers a bug that an invariant finds."""

    def register(patches: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        BUGS[patches.__name__] = number, patches
        return patches

    return register


@bug(1)
def a_full_queue_drops_the_oldest() -> list[Patch]:
    plain = Flow.on_scored

    def on_scored(self: Flow, trajectories: Any) -> Any:
        commands = plain(self, trajectories)
        if self.ready > self.batch_size:
            del self.queue[next(uid for uid, each in self.queue.items() if each.is_kept)]
        return commands

    return [(Flow, "on_scored", on_scored)]


@bug(2)
def only_the_cursor_is_saved() -> list[Patch]:
    return [(saving, "snapshot", lambda flow, running: [])]


@bug(2)
def what_is_being_trained_on_is_not_saved() -> list[Patch]:
    plain = saving.snapshot

    def snapshot(flow: Flow, running: Any) -> Any:
        handed_out = {group.prompt.uid for group in (flow.training.kept if flow.training else ())}
        return [entry for entry in plain(flow, running) if entry["uid"] not in handed_out]

    return [(saving, "snapshot", snapshot)]


@bug(3)
def the_buffer_is_not_saved() -> list[Patch]:
    plain = saving.snapshot
    return [(saving, "snapshot", lambda flow, running: [e for e in plain(flow, running) if not e["is_kept"]])]


@bug(4)
def tokens_are_stamped_on_receipt() -> list[Patch]:
    plain = Router.on_events

    def on_events(self: Router, replica: int, generation: Any, events: Iterable[Event]) -> Any:
        stamped = [
            replace(each, completion=_stamped(each.completion, self.version)) if isinstance(each, Finished) else each
            for each in events
        ]
        return plain(self, replica, generation, stamped)

    return [(Router, "on_events", on_events)]


def _stamped(completion: Completion, version: int) -> Completion:
    return replace(completion, versions=((version, len(completion.token_ids)),) if completion.token_ids else ())


@bug(5)
def first_come_first_served() -> list[Patch]:
    plain = Flow._hand_out

    def hand_out(self: Flow) -> Any:
        self.queue = dict(sorted(self.queue.items(), key=lambda each: each[1].is_kept is None))
        return plain(self)

    return [(Flow, "_hand_out", hand_out)]


@bug(5)
def sampling_goes_ahead_before_the_weights_are_there() -> list[Patch]:
    def ready(self: fleeting.Rank) -> bool:
        return self.version is not None

    return [(Router, "is_synced", True), (fleeting.Rank, "is_ready", property(ready))]


@bug(6)
def a_chunk_is_heard_twice() -> list[Patch]:
    def note(self: PartlySampled, partial: Partial) -> None:
        new = Completion(partial.token_ids, partial.log_probs, "abort", partial.versions)
        self.so_far = new if self.so_far is None else fleeting.joined(self.so_far, new)

    return [(PartlySampled, "note", note)]


@bug(6)
def a_retry_drops_a_token() -> list[Patch]:
    plain = PartlySampled.hear

    def hear(self: PartlySampled, event: Event) -> Any:
        if isinstance(event, Finished):
            self.kept = max(0, self.kept - 1)
        return plain(self, event)

    return [(PartlySampled, "hear", hear)]


@bug(6)
def there_is_no_attempt_number() -> list[Patch]:
    plain = Router.on_events

    def on_events(self: Router, replica: int, generation: Any, events: Iterable[Event]) -> Any:
        known = [each for each in events if each.uid in self.flights]
        return plain(self, replica, generation, [replace(e, attempt=self.flights[e.uid].attempt) for e in known])

    return [(Router, "on_events", on_events)]


@bug(7)
def the_budget_starts_again() -> list[Patch]:
    plain = PartlySampled.given

    def given(self: PartlySampled) -> Request:
        request = plain(self)
        more = request.params.max_new_tokens + len(request.sampled_ids)
        return replace(request, params=replace(request.params, max_new_tokens=more))

    return [(PartlySampled, "given", given)]


@bug(7)
def an_attempt_begins_behind_the_end() -> list[Patch]:
    return [(fleeting, "unfinished", lambda sampled, request: sampled)]


@bug(7)
def a_restored_episode_begins_behind_the_end() -> list[Patch]:
    return [(episode, "unfinished", lambda sampled, request: sampled)]


@bug(7)
def tokens_of_a_lost_attempt_are_forgotten() -> list[Patch]:
    plain = PartlySampled.hear

    def hear(self: PartlySampled, event: Event) -> Any:
        if isinstance(event, Finished):
            self.kept = 0
        return plain(self, event)

    return [(PartlySampled, "hear", hear)]


@bug(8)
def a_start_overtakes_a_load() -> list[Patch]:
    def ready(self: fleeting.Rank) -> bool:
        return self.version is not None

    return [(fleeting.Rank, "is_ready", property(ready))]


@bug(9)
def an_old_acknowledgement_is_heard() -> list[Patch]:
    plain = Router.on_loaded

    def on_loaded(self: Router, replica: int, generation: Any, version: int) -> None:
        each = self.ranks.get(replica)
        if each is not None and each.loading is not None:
            plain(self, replica, each.generation, each.loading)

    return [(Router, "on_loaded", on_loaded)]


@bug(9)
def there_is_no_generation() -> list[Patch]:
    return [(Router, "_is_current", lambda self, rank, generation: rank in self.ranks)]


@bug(10)
def permits_leak() -> list[Patch]:
    plain = Router._end

    def end(self: Router, flight: PartlySampled) -> None:
        held = dict(self.ranks[flight.rank].given) if flight.rank is not None else {}
        plain(self, flight)
        if flight.rank is not None:
            self.ranks[flight.rank].given = held

    return [(Router, "_end", end)]


@bug(10)
def an_event_of_another_replica_is_heard() -> list[Patch]:
    plain = Router.on_lost

    def on_lost(self: Router, replica: int, generation: Any) -> Any:
        commands = plain(self, replica, generation)
        for uid in self.waiting:  # still with the replica that is gone
            self.flights[uid].rank = replica
        return commands

    return [(Router, "on_lost", on_lost)]


@bug(11)
def there_is_no_back_pressure() -> list[Patch]:
    plain = Flow._start

    def start(self: Flow) -> Any:
        training, self.training = self.training, None
        version = self.version
        self.version = training.step if training else version
        commands = plain(self)
        self.training, self.version = training, version
        return commands

    return [(Flow, "_start", start)]


@bug(11)
def restored_groups_are_not_counted() -> list[Patch]:
    plain, live = Flow.restart, Flow._live

    def restart(self: Flow, version: int, queue: Any) -> None:
        plain(self, version, queue)
        self.restored = set(self.queue)  # type: ignore[attr-defined]

    def counted(self: Flow) -> int:
        return live.fget(self) - len(self.restored & set(self.queue))  # type: ignore[attr-defined]

    return [(Flow, "restart", restart), (Flow, "_live", property(counted))]


@bug(12)
def a_group_is_short() -> list[Patch]:
    plain = Flow._hand_out

    def hand_out(self: Flow) -> Any:
        commands = plain(self)
        for command in commands:
            command.kept[:] = [Group(each.prompt, each.trajectories[:-1]) for each in command.kept]
        return commands

    return [(Flow, "_hand_out", hand_out)]


@bug(12)
def a_step_takes_all_that_were_sampled_ahead_for_later_ones() -> list[Patch]:
    plain = Flow._hand_out
    takes_all = property(lambda self: plain_most.fget(self) + int(self.max_staleness * self.batch_size))
    plain_most = Flow._most_read

    def hand_out(self: Flow) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Flow, "_most_read", takes_all)
            return plain(self)

    return [(Flow, "_hand_out", hand_out)]


@bug(13)
def stale_groups_are_discarded() -> list[Patch]:
    plain = Flow._hand_out

    def hand_out(self: Flow) -> Any:
        for each in self.queue.values():
            if each.is_kept and _oldest(each.group(each.scored)) < self.version:
                each.is_kept = False
        return plain(self)

    return [(Flow, "_hand_out", hand_out)]


def _oldest(group: Group) -> float:
    turns = [turn for each in group.trajectories for turn in each.turns]
    return min((version for turn in turns for version, _ in turn.versions), default=math.inf)


@bug(14)
def a_lost_request_is_forgotten() -> list[Patch]:
    plain = Router.on_lost

    def on_lost(self: Router, rank: int, generation: Any) -> Any:
        told = plain(self, rank, generation)
        self.waiting = {uid: each for uid, each in self.waiting.items() if not getattr(each, "kept", 0)}
        return told

    return [(Router, "on_lost", on_lost)]


@bug(14)
def prompts_are_started_behind_the_last_step() -> list[Patch]:
    plain = Flow._start

    def start(self: Flow) -> Any:
        last, self.last_step = self.last_step, math.inf
        commands = plain(self)
        self.last_step = last
        return commands

    return [(Flow, "_start", start)]


@bug(15)
def an_address_is_in_a_message() -> list[Patch]:
    plain = World.note

    def note(self: World, kind: str, what: Sequence[Any]) -> None:
        plain(self, kind, [*what, object.__repr__(self)])

    return [(World, "note", note)]


@bug(16)
def an_environment_steps_twice() -> list[Patch]:
    plain = Driver._carry_out

    def carry_out(self: Driver, episode: Episode, commands: Sequence[Command]) -> None:
        plain(self, episode, [each for each in commands for _ in range(1 + isinstance(each, Step))])

    return [(Driver, "_carry_out", carry_out)]


@bug(17)
def the_prefix_cache_survives_new_weights() -> list[Patch]:
    return [(actors.Replica, "_forget", lambda self: None)]


@bug(17)
def homes_survive_new_weights() -> list[Patch]:
    plain = Router.on_weights

    def on_weights(self: Router, version: int) -> None:
        prefixes = {rank: each.prefixes for rank, each in self.ranks.items()}
        plain(self, version)
        for rank, each in self.ranks.items():
            each.prefixes = prefixes[rank]

    return [(Router, "on_weights", on_weights)]


@bug(18)
def a_step_is_summed_in_another_order() -> list[Patch]:
    plain = World.updated
    return [(World, "updated", lambda self, kept: plain(self, kept[::-1]))]


@bug(18)
def draws_are_named_by_another_step() -> list[Patch]:
    plain, plain_start = saving.restore, Flow._start

    def restore(flow: Flow, source: Any, version: int, entries: Any) -> Any:
        return plain(flow, source, version, [{**entry, "step": entry["step"] + 1} for entry in entries])

    def start(self: Flow) -> Any:
        episodes, self.episodes = self.episodes, lambda prompts, step: episodes(prompts, self.version + 2)
        commands = plain_start(self)
        self.episodes = episodes
        return commands

    return [(saving, "restore", restore), (Flow, "_start", start)]


@bug(19)
def an_episode_goes_on_where_it_was_not_begun() -> list[Patch]:
    plain = fleeting.Flight.retry

    def retry(self: fleeting.Flight) -> None:
        given = self.num_given
        plain(self)
        self.num_given = min(given, len(self.parts))

    return [(fleeting.Flight, "retry", retry)]


@bug(19)
def a_closed_episode_stays_on_its_rank() -> list[Patch]:
    plain = fleeting.Fleet.abort

    def abort(self: fleeting.Fleet, uids: Any, *, silently: bool = False) -> Any:
        return plain(self, uids, silently=silently and not self.has_parts)

    return [(fleeting.Fleet, "abort", abort)]


@bug(20)
def outcomes_are_heard_twice() -> list[Patch]:
    plain = fleeting.Fleet.on_events

    def on_events(self: fleeting.Fleet, rank: int, generation: Any, events: Any) -> Any:
        told = plain(self, rank, generation, events)
        return told or [each for each in events if isinstance(each, fleeting.Done) and not self.has_parts]

    return [(fleeting.Fleet, "on_events", on_events)]


@bug(20)
def what_a_lost_rank_had_to_score_is_forgotten() -> list[Patch]:
    plain = fleeting.Fleet.on_lost

    def on_lost(self: fleeting.Fleet, rank: int, generation: Any) -> Any:
        told = plain(self, rank, generation)
        for uid in [*self.waiting] if type(self) is fleeting.Fleet else ():
            self.abort([uid], silently=True)
        return told

    return [(fleeting.Fleet, "on_lost", on_lost)]


def test_each_invariant_has_a_bug() -> None:
    assert {number for number, _ in BUGS.values()} == ALL
    assert all(named(number) for number in ALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number, patches = BUGS[name]
    for target, attribute, replacement in patches():
        monkeypatch.setattr(target, attribute, replacement)
    for seed in range(SEEDS):
        try:
            World(Plan.of(seed, staleness=0.0 if number == 18 else None), checks={number}).run()
        except InvariantError as violation:
            assert violation.number == number
            return
        except Exception:  # the bug breaks something that is not looked at here
            continue
    pytest.fail(f"{name} was not found in {SEEDS} schedules")
