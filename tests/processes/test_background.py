# SPDX-License-Identifier: Apache-2.0
import asyncio
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait

import pytest

from tests.raising import raises
from whet.errors import DeadlineError
from whet.processes.background import Background, Mailbox, in_loop, within


def test_calls_are_made_in_order_and_the_thread_ends_after_them() -> None:
    seen: list[int] = []
    thread = Background("in-order")
    futures = [thread.submit(lambda number=number: seen.append(number) or number) for number in range(100)]  # type: ignore
    thread.close()
    assert [future.result(10) for future in futures] == seen == list(range(100))
    end = time.monotonic() + 10
    while any(each.name == "in-order" for each in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(each.name == "in-order" for each in threading.enumerate())


def test_several_threads_work_at_a_time_and_a_call_that_has_not_begun_can_be_cancelled() -> None:
    together, begun = threading.Barrier(3), []
    threads = Background("together", 2)
    first = [threads.submit(together.wait) for _ in range(2)]
    third = threads.submit(lambda: begun.append(1))
    assert third.cancel()
    together.wait(10)
    assert wait(first, 10).not_done == set()
    threads.close()
    assert begun == []


def test_what_a_call_raises_is_raised_where_it_is_waited_for() -> None:
    def leave() -> None:
        raise SystemExit(0)

    def refuse() -> None:
        raise TimeoutError("of the call itself")

    late = DeadlineError("a call", "late", "an earlier end")
    with pytest.raises(RuntimeError, match=r"SystemExit\(0\)"):
        within(10, leave, late)
    with pytest.raises(TimeoutError, match="of the call itself"):
        within(10, refuse, late)
    assert within(10, lambda: 3, late) == 3


def test_a_late_call_is_left_behind() -> None:
    release = threading.Event()
    start = time.monotonic()
    with raises(DeadlineError, "a file", found="not there after 0.1 s", change="wait longer"):
        within(0.1, lambda: release.wait(20), DeadlineError("a file", "not there after 0.1 s", change="wait longer"))
    assert time.monotonic() - start < 5
    release.set()


def test_the_owner_of_a_mailbox_carries_calls_out_in_order() -> None:
    seen, box = list[int](), Mailbox()
    first = box.submit(lambda: seen.append(1))
    second = box.submit(lambda: box.submit(lambda: seen.append(3)) and seen.append(2))
    assert not first.done()
    box.serve(0.0)
    assert seen == [1, 2, 3] and second.done()
    began = time.monotonic()
    box.serve(0.2)
    assert time.monotonic() - began >= 0.2


def test_an_error_of_the_owner_breaks_what_waits_and_what_comes() -> None:
    box, error = Mailbox(), ValueError("of the thread")
    kept = box.promise()
    kept.set_result(7)
    promised, called = box.promise(), box.submit(lambda: 1)
    box.fail(error)
    box.fail(ValueError("a later one"))
    later = box.submit(lambda: 1)
    assert [each.exception(0) for each in (promised, called, later, box.promise())] == [error] * 4
    assert kept.result() == 7 and box.error is error
    box.serve(0.0)  # calls that are broken are not carried out


def test_coroutines_of_all_threads_run_in_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet.processes.background._loops", {})  # the first calls come at once
    ready = threading.Barrier(8)

    async def where() -> tuple[int, int]:
        await asyncio.sleep(0.01)
        return id(asyncio.get_running_loop()), threading.get_ident()

    def ask(_: int) -> tuple[int, int]:
        ready.wait(10)
        return in_loop(where()).result(10)

    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(ask, range(8)))
    assert len(found) == 1 and threading.get_ident() not in dict(found).values()


def test_cancelling_the_future_cancels_the_coroutine() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def hangs() -> None:
        begun.set()
        try:
            await asyncio.sleep(100)
        finally:
            ended.set()

    call = in_loop(hangs())
    assert begun.wait(10) and call.cancel() and ended.wait(10)
    with pytest.raises(CancelledError):
        call.result()
