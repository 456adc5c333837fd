# SPDX-License-Identifier: Apache-2.0
"""The router of requests: the replica of each, and its changes when replicas come, go and load weights."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from whet.rollout.fleet import RETRIES, Give, PartlySampled, Router, assign
from whet.rollout.protocol import Completion, Failed, Finished, Partial, Request, SamplingParams
from whet.types import Failure


def request(uid: str = "a", attempt: int = 0, sampled: tuple[int, ...] = (), **params: Any) -> Request:
    prompt = tuple(range(10 * (1 + ord(uid[0]) - 97), 10 * (1 + ord(uid[0]) - 97) + 4))
    return Request(uid, prompt, SamplingParams(**{"max_new_tokens": 8, **params}), 0, attempt, sampled)


def completion(*tokens: int, reason: Any = "stop", version: int = 0) -> Completion:
    return Completion(tokens, (-0.5,) * len(tokens), reason, ((version, len(tokens)),) if tokens else ())


def partial(uid: str, attempt: int, offset: int, *tokens: int, version: int = 0) -> Partial:
    return Partial(uid, attempt, offset, tokens, (-0.5,) * len(tokens), ((version, len(tokens)),))


def router(replicas: int = 2, most: int = 4) -> Router:
    made = Router(most)
    for number in range(replicas):
        assert made.on_join(number) == []
        load(made, number, 0)
    return made


def load(made: Router, number: int, version: int) -> None:
    """The weights that are on their way to a rank arrive."""
    assert made.ranks[number].loading == version
    made.on_loaded(number, made.ranks[number].generation, version)


def gives(given: Sequence[Give]) -> dict[int, list[tuple[str, int, tuple[int, ...]]]]:
    return {each.rank: [(r.uid, r.attempt, r.sampled_ids) for r in each.tasks] for each in given if each.tasks}


def finish(made: Router, number: int, uid: str, attempt: int, whole: Completion) -> list[Any]:
    return made.on_events(number, made.ranks[number].generation, [Finished(uid, attempt, whole)])


def test_requests_of_a_lost_replica_go_on_elsewhere_with_their_tokens() -> None:
    made = router()
    made.submit(request("a", attempt=1, sampled=(7,)))
    assert gives(made.give()) == {0: [("a", RETRIES, (7,))]}
    first = made.ranks[0].generation
    [told] = made.on_events(0, first, [partial("a", RETRIES, 1, 8, 9, version=3)])
    assert told == partial("a", 1, 1, 8, 9, version=3)
    assert made.on_lost(0, first) == []
    made = pickle.loads(pickle.dumps(made))
    assert gives(made.give()) == {1: [("a", RETRIES + 1, (7, 8, 9))]}
    [told] = made.on_events(1, made.ranks[1].generation, [partial("a", RETRIES + 1, 3, 4, version=5)])
    assert told == Partial("a", 1, 1, (8, 9, 4), (-0.5,) * 3, ((3, 2), (5, 1)))
    [told] = finish(made, 1, "a", RETRIES + 1, completion(4, 5, version=5))
    whole = Completion((8, 9, 4, 5), (-0.5,) * 4, "stop", ((3, 2), (5, 2)))
    assert told == Finished("a", 1, whole) and not made.flights and not made.waiting


def test_what_comes_late_twice_or_from_elsewhere_changes_nothing() -> None:
    made = router()
    made.submit(request())
    made.submit(request())
    made.give()
    before, old = pickle.dumps(made), made.ranks[0].generation
    for number, generation, attempt in (
        (1, made.ranks[1].generation, 0),
        (0, 99, 0),
        (0, 0, 0),
        (0, old, 1),
    ):
        assert made.on_events(number, generation, [Finished("a", attempt, completion(1))]) == []
    assert pickle.dumps(made) == before
    made.on_join(0)  # again: it was restarted
    assert gives(made.give()) == {1: [("a", 1, ())]}
    assert made.on_events(0, old, [Finished("a", 0, completion(1))]) == [] == made.on_lost(0, old)
    assert len(finish(made, 1, "a", 1, completion(2))) == 1
    assert finish(made, 1, "a", 1, completion(2)) == []


def test_chunks_are_counted_once_and_a_gap_is_not_jumped() -> None:
    made = router(1)
    made.submit(request())
    made.give()
    generation = made.ranks[0].generation
    chunks = [partial("a", 0, 0, 1, 2), partial("a", 0, 0, 1, 2), partial("a", 0, 3, 4), partial("a", 0, 1, 2, 3)]
    told = [made.on_events(0, generation, [chunk])[0] for chunk in chunks]
    assert [each.token_ids for each in told] == [*((1, 2), (1, 2), (1, 2), (1, 2, 3))]


def test_a_request_that_streams_is_told_each_token_once() -> None:
    made = router(1)
    made.submit(replace(request(sampled=(9,)), streams=True))
    made.give()
    generation = made.ranks[0].generation
    chunks = [partial("a", 0, 1, 1), partial("a", 0, 1, 1), partial("a", 0, 1, 1, 2, 3), partial("a", 0, 4, 4)]
    told = [command for chunk in chunks for command in made.on_events(0, generation, [chunk])]
    assert told == [partial("a", 0, 1, 1), partial("a", 0, 2, 2, 3), partial("a", 0, 4, 4)]


@pytest.mark.parametrize(
    ("tokens", "params", "kept"),
    [((1, 2), {"max_new_tokens": 2}, (1,)), ((1, 9), {"stop_token_ids": (9,)}, (1,)), ((1,), {"stop": ("x",)}, ())],
)
def test_a_token_that_may_be_the_last_is_sampled_again(
    tokens: tuple[int, ...], params: dict[str, Any], kept: tuple[int, ...]
) -> None:
    made = router(1)
    made.submit(request(**params))
    made.give()
    generation = made.ranks[0].generation
    made.on_events(0, generation, [partial("a", 0, 0, *tokens)])
    made.on_join(0)
    load(made, 0, 0)
    assert gives(made.give()) == {0: [("a", 1, kept)]}


def test_a_replica_gets_nothing_before_it_has_the_newest_weights() -> None:
    made = router(1)
    made.submit(request())
    made.give()
    made.on_weights(1)
    made.on_join(1)
    first, other = made.ranks[0], made.ranks[1]
    assert first.loading == other.loading == 1
    made.submit(request("b"))
    assert made.give() == []
    made.on_loaded(0, first.generation, 0)
    assert made.give() == [] and not made.is_synced, "an old acknowledgement"
    made.on_loaded(0, first.generation, 1)
    assert made.is_synced, "the other samples nothing yet"
    assert gives(made.give()) == {0: [("b", 0, ())]}
    made.on_weights(2)
    assert (first.loading, other.loading) == (2, 1), "the other is loading"
    made.on_loaded(1, other.generation, 1)
    assert other.loading == 2
    made.on_loaded(0, first.generation, 2)
    assert not made.is_synced, "one still samples with older weights"
    made.on_loaded(1, other.generation, 2)
    assert made.is_synced


def test_a_replica_whose_weights_fail_joins_again_and_its_requests_go_elsewhere() -> None:
    made = router()
    made.submit(request())
    made.give()
    made.on_weights(1)
    first = made.ranks[0].generation
    load(made, 1, 1)
    assert not made.is_synced
    assert made.on_lost(0, first) == [] and made.is_synced
    assert gives(made.give()) == {1: [("a", 1, ())]}
    made.on_join(0)
    again = made.ranks[0].generation
    assert again > first
    made.on_loaded(0, first, 1)
    assert not made.ranks[0].is_ready
    made.on_loaded(0, again, 1)
    assert made.ranks[0].is_ready and made.is_synced


def test_what_a_lost_replica_had_goes_to_the_front_of_those_that_are_left() -> None:
    made = router(most=1)
    for uid in ("a", "b", "c"):
        made.submit(request(uid))
    assert gives(made.give()) == {0: [("a", 0, ())], 1: [("b", 0, ())]}
    assert made.on_lost(1, made.ranks[1].generation) == []
    assert made.give() == [], "the one that is left is full"
    assert len(finish(made, 0, "a", 0, completion(1))) == 1
    assert gives(made.give()) == {0: [("b", 1, ())]} and list(made.waiting) == ["c"]
    assert made.on_lost(0, made.ranks[0].generation) == [] == made.give()
    assert list(made.waiting) == ["b", "c"] and not made.ranks


def test_aborts_find_a_request_wherever_it_is() -> None:
    made = router(1, most=1)
    made.submit(request("a"))
    made.give()
    made.submit(request("b"))
    generation = made.ranks[0].generation
    made.on_events(0, generation, [partial("a", 0, 0, 1, 2)])
    nothing = completion(reason="abort")
    assert made.abort(["a", "b", "c"]) == [Finished("b", 0, nothing)]
    assert made.give() == [Give(0, generation, (), ("a",))] and made.give() == []
    [told] = made.on_lost(0, generation)
    assert told == Finished("a", 0, completion(1, 2, reason="abort")) and not made.flights


def test_a_failure_is_told_and_a_later_attempt_replaces_an_earlier_one() -> None:
    made = router(1)
    made.submit(request())
    made.give()
    generation = made.ranks[0].generation
    made.submit(request(attempt=2))
    [given] = made.give()
    assert given.ended == ("a",) and gives([given]) == {0: [("a", 2 * RETRIES, ())]}
    failed = Failure("engine", "too long")
    assert made.on_events(0, generation, [Failed("a", 0, failed)]) == []
    assert made.on_events(0, generation, [Failed("a", 2 * RETRIES, failed)]) == [Failed("a", 2, failed)]


def test_a_request_that_is_lost_with_every_replica_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartlySampled, "most_retries", 2)
    made = Router(4)
    made.submit(request())
    for number in range(3):
        made.on_join(number)
        load(made, number, 0)
        assert gives(made.give()) == {number: [("a", number, ())]}
        told = made.on_lost(number, made.ranks[number].generation)
    [failed] = told
    assert isinstance(failed, Failed) and not made.flights and not made.waiting
    assert failed.failure.source == "engine" and "3 replicas" in failed.failure.message


def test_nothing_is_given_in_a_pause() -> None:
    made = router(1)
    made.is_paused = True
    made.submit(request())
    assert made.give() == []
    made.is_paused = False
    assert gives(made.give()) == {0: [("a", 0, ())]}


def test_a_request_goes_where_its_prefix_was_read_if_that_costs_no_balance() -> None:
    made = router(2)
    for uid in ("a", "b", "a1", "b1"):  # a1 begins as a does
        made.submit(request(uid))
        if uid == "b":
            assert gives(made.give()) == {0: [("a", 0, ())], 1: [("b", 0, ())]}
    assert gives(made.give([1])) == {1: [("b1", 0, ())]}, "others leave their share"
    assert gives(made.give()) == {0: [("a1", 0, ())]}
    made.submit(request("b2"))
    made.submit(request("b3"))
    made.submit(request("b4"))
    assert sorted(map(len, gives(made.give()).values())) == [1, 2], "balance comes first"
    made.on_weights(1)
    assert not any(each.prefixes for each in made.ranks.values())
    placed = assign([request("a"), request("b")], {0: 0, 1: 0}, 9, lambda each: {"a": 1, "b": 0}[each.uid])
    assert {rank: [each.uid for each in share] for rank, share in placed.items()} == {1: ["a"], 0: ["b"]}
