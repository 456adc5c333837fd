# SPDX-License-Identifier: Apache-2.0
"""Sessions, order, retries, limits and owners, event by event and in any order."""

from __future__ import annotations

import random

import pytest

from whet.guard import RefusedError
from whet.plugins.serving.tinker.desk import Bounds, Desk, RequestFailure

ME, YOU = "me", "you"


def desk(**bounds: float) -> Desk:
    made = Desk(Bounds(**bounds))  # type: ignore[arg-type]
    made.open(ME, "s", 0.0)
    return made


def model(made: Desk, number: int = 0) -> str:
    name = made.add_model(ME, "s", number, 0.0)
    made.enter(name, 0, b"create", "create", 0, 0.0)
    request = made.take()
    assert request is not None and request.work == "create"
    made.finish(request.id, {})
    return name


def taken(made: Desk) -> list[str]:
    found = []
    while (request := made.take()) is not None:
        assert request.work is not None
        found.append(request.work)
    return found


def status(error: pytest.ExceptionInfo[RefusedError]) -> int:
    return error.value.status


def test_requests_run_in_order_however_they_come() -> None:
    draw = random.Random(0)
    for _ in range(100):
        made = desk()
        name, order = model(made), list(range(1, 9))
        draw.shuffle(order)
        found = list[str]()
        for seq in order:
            made.enter(name, seq, bytes([seq]), str(seq), 1, 0.0)
            if draw.random() < 0.5:
                made.enter(name, seq, bytes([seq]), "again", 1, 0.0)
            found += taken(made) if draw.random() < 0.5 else []
        assert found + taken(made) == [str(seq) for seq in range(1, 9)]


def test_a_retry_is_the_same_request() -> None:
    made = desk()
    name = model(made)
    first = made.enter(name, 1, b"x", "work", 5, 0.0)
    assert made.enter(name, 1, b"x", "other", 5, 0.0) is first and taken(made) == ["work"]
    made.finish(first.id, {"loss": 1})
    assert made.enter(name, 1, b"x", "other", 5, 0.0).result == {"loss": 1} and taken(made) == []
    with pytest.raises(RefusedError) as error:
        made.enter(name, 1, b"y", "work", 5, 0.0)
    assert status(error) == 422


def test_models_take_turns() -> None:
    made = desk()
    names = [model(made, number) for number in range(3)]
    for name, count in zip(names, (3, 1, 2), strict=True):
        for seq in range(1, count + 1):
            made.enter(name, seq, b"", f"{name[-1]}{seq}", 0, 0.0)
    found = taken(made)
    assert sorted(found[:3]) == ["01", "11", "21"] and sorted(found[3:5]) == ["02", "22"] and found[5] == "03"


def test_nothing_of_another_owner_exists() -> None:
    made = desk()
    name = model(made)
    request = made.enter(name, 1, b"", "work", 0, 0.0)
    assert made.add_sampler(made.session(ME, "s"), 0, None) == "s:sample:0"
    for call, code in (
        (lambda: made.session(YOU, "s"), 410),
        (lambda: made.add_model(YOU, "s", 1, 0.0), 410),
        (lambda: made.owned(YOU, name), 404),
        (lambda: made.owned(YOU, "s:sample:0"), 404),
        (lambda: made.owned(ME, "s:train:7"), 404),
        (lambda: made.find(YOU, request.id), 410),
    ):
        with pytest.raises(RefusedError) as error:
            call()
        assert status(error) == code
    assert made.owned(ME, name).owner == ME and made.find(ME, request.id) is request


def test_a_session_without_a_heartbeat_leaves_nothing() -> None:
    told = list[str]()
    made = Desk(Bounds(session_seconds=60), told.append)
    made.open(ME, "s", 0.0)
    name = model(made)
    request = made.enter(name, 1, b"", "work", 100, 0.0)
    made.session(ME, "s", 50.0)
    assert made.sweep(100.0) == []
    [(ended, session)] = made.sweep(111.0)
    assert ended == "s" and session.models == {name} and request.id in told
    made.finish(request.id, {})  # its work was running
    assert not (made.sessions or made.models or made.requests) and made._bytes == 0 and made.take() is None
    with pytest.raises(RefusedError) as error:
        made.find(ME, request.id)
    assert status(error) == 410


def test_too_much_is_refused_but_never_the_next_in_order() -> None:
    made = desk(waiting=2, body_bytes=10, sessions=1, models=1)
    name = model(made)
    for seq in (3, 2):
        made.enter(name, seq, b"", str(seq), 1, 0.0)
    for seq, size in ((4, 1), (5, 100)):
        with pytest.raises(RefusedError) as error:
            made.enter(name, seq, b"", str(seq), size, 0.0)
        assert status(error) == 429
    made.enter(name, 1, b"", "1", 100, 0.0)
    assert taken(made) == ["1", "2", "3"]
    for call in (lambda: made.open(ME, "t", 0.0), lambda: made.add_model(ME, "s", 1, 0.0)):
        with pytest.raises(RefusedError) as error:
            call()
        assert status(error) == 429
    assert made.add_model(ME, "s", 0, 0.0) == name


def test_a_gap_fails_those_behind_it_and_the_model_goes_on() -> None:
    made = desk(gap_seconds=30, session_seconds=1e9)
    name = model(made)
    late = [made.enter(name, seq, b"", str(seq), 0, 5.0) for seq in (3, 4)]
    made.sweep(30.0)
    assert [each.result for each in late] == [None, None]
    made.sweep(36.0)
    assert all(isinstance(each.result, RequestFailure) and each.result.category == "user" for each in late)
    made.enter(name, 5, b"", "5", 0, 40.0)
    assert taken(made) == ["5"]
    with pytest.raises(RefusedError) as error:
        made.enter(name, 2, b"", "2", 0, 41.0)
    assert status(error) == 422


def test_a_result_that_was_read_is_kept_for_a_while() -> None:
    made = desk(kept_seconds=100, session_seconds=1e9)
    name = model(made)
    request = made.enter(name, 1, b"", "work", 0, 0.0)
    made.finish(request.id, b"proto")
    made.sweep(1000.0)
    made.find(ME, request.id).read_at = 1000.0
    made.sweep(1099.0)
    assert made.find(ME, request.id).result == b"proto"
    made.sweep(1101.0)
    with pytest.raises(RefusedError):
        made.find(ME, request.id)


def test_one_key_leaves_room_for_another() -> None:
    """Of 8 models one key has 4, the next one 2, the third 1."""
    made = Desk(Bounds(models=8))
    found = []
    for owner in ("a", "b", "c"):
        made.open(owner, owner, 0.0)
        for number in range(9):
            try:
                made.add_model(owner, owner, number, 0.0)
            except RefusedError as error:
                assert error.status == 429
                found.append(number)
                break
    assert found == [4, 2, 1]


def test_a_session_that_reads_no_results_is_stopped() -> None:
    made = desk(unread_bytes=10, session_seconds=1e9)
    name = model(made)
    made.read(ME, f"{name}:0", 0.0)
    made.finish(made.enter(name, 1, b"", "work", 0, 0.0).id, b"a long result")
    with pytest.raises(RefusedError) as error:
        made.enter(name, 2, b"", "work", 0, 0.0)
    assert status(error) == 429
    for _ in range(2):  # the second time counts for nothing
        assert made.read(ME, f"{name}:1", 0.0) == b"a long result"
    assert made.enter(name, 2, b"", "work", 0, 0.0).session.unread == 0


def test_work_in_parts_lets_others_have_their_turn() -> None:
    made = desk()
    first, second = model(made, 0), model(made, 1)
    for name in (first, second):
        made.enter(name, 1, b"", name, 0, 0.0)
        made.enter(name, 2, b"", f"{name} then", 0, 0.0)
    found = list[object]()
    for _ in range(4):
        request = made.take()
        assert request is not None
        found.append(request.work)
        if len(found) < 3:  # the first parts of both
            made.put_back(request)
    assert found == [first, second, first, second]
    assert taken(made) == [f"{first} then", f"{second} then"]
    made.put_back(made.enter(first, 3, b"", "x", 0, 0.0))
    made.end("s")
    made.put_back(request)  # its session has ended
    assert made.take() is None
