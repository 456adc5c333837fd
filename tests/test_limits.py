# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import resource
import signal
import threading
import time

import pytest

from whet import limits
from whet.limits import bounded, cause


def test_a_block_without_end_is_ended_and_everything_is_as_before() -> None:
    before = signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"\b0\.2 s\b"), bounded(0.2):
        while True:
            pass
    assert 0.2 <= time.monotonic() - start < 5.0
    assert (signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)) == before


def test_time_in_which_the_thread_does_not_run_counts_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where other processes keep all cores busy."""
    monkeypatch.setattr(limits, "_AGAIN_SECONDS", 0.02)
    with bounded(0.1):
        time.sleep(0.2)
    start = time.monotonic()
    with pytest.raises(TimeoutError), bounded(0.1):
        time.sleep(60.0)
    assert 0.3 <= time.monotonic() - start < 5.0


def test_an_alarm_that_is_swallowed_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_AGAIN_SECONDS", 0.05)
    swallowed = 0
    with pytest.raises(TimeoutError), bounded(0.05):
        while True:
            try:
                time.sleep(10.0)
            except TimeoutError:
                swallowed += 1
                if swallowed == 3:
                    raise


@pytest.mark.slow
def test_what_would_fill_the_memory_is_refused_by_the_allocation_itself() -> None:
    start = time.monotonic()
    with pytest.raises(MemoryError) as raised, bounded():
        b"a" * 2**31
    assert "1 GiB" in cause(raised.value)
    assert time.monotonic() - start < 5.0
    assert len(b"a" * (2**30 + 2**20)) > 2**30  # behind the block there is as much as ever


def test_a_block_inside_another_has_the_outer_ones_limits() -> None:
    with bounded(60.0):
        with bounded(0.01):
            time.sleep(0.05)
        with pytest.raises(MemoryError):
            b"a" * 2**31


def test_another_thread_has_no_limits() -> None:
    done: list[bool] = []

    def work() -> None:
        with bounded(0.01):
            time.sleep(0.05)
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_a_timer_that_ran_before_goes_on() -> None:
    rung: list[float] = []
    handler = signal.signal(signal.SIGALRM, lambda *_: rung.append(time.monotonic()))
    before = signal.setitimer(signal.ITIMER_REAL, 0.3)
    start = time.monotonic()
    try:
        with bounded():
            time.sleep(0.1)
        while not rung and time.monotonic() - start < 5.0:
            time.sleep(0.01)
        assert 0.25 <= rung[0] - start < 5.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)
        signal.signal(signal.SIGALRM, handler)
