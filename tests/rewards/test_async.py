# SPDX-License-Identifier: Apache-2.0
"""Async functions that score many items at a time in one process, memory limits, and processes that die in a row."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest

from tests.raising import raises
from whet.errors import ConfigError, RewardError
from whet.rewards.pool import RewardPool
from whet.types import Failure, RewardItem, RewardResult

LATER = """
import asyncio, ctypes, os, re, time

running, most = 0, 0

async def compute_score(solution_str):
    global running, most
    verb, _, rest = solution_str.partition(" ")
    running += 1
    most = max(most, running)
    try:
        if verb == "wait": await asyncio.sleep(float(rest))
        if verb == "block": time.sleep(float(rest))
        if verb == "regex": re.match("(a+)+$", "a" * 60 + "b")
        if verb == "exit": os._exit(3)
        if verb == "segv": ctypes.string_at(0)
        if verb == "raise": raise ValueError(rest)
        if verb == "quit": raise SystemExit(rest)
        if verb == "cancel": raise asyncio.CancelledError(rest)
        if verb == "stubborn":
            while True:
                try: await asyncio.sleep(1000)
                except asyncio.CancelledError: pass
        if verb == "most":
            await asyncio.sleep(0.2)
            return float(most)
        if verb == "number": return float(rest)
        return 1.0
    finally:
        running -= 1
"""
HOARDS = """
import os, subprocess, sys, time
kept = []

def compute_score(solution_str):
    verb, _, rest = solution_str.partition(" ")
    if verb == "hoard":
        while True:
            kept.append(bytearray(b"x") * 2**22)
            time.sleep(0.005)
    if verb == "leak":
        kept.append(bytearray(b"x") * 2**24)
        time.sleep(0.11)
    if verb == "child":
        code = "import time; x = bytearray(b'x') * (500 * 2**20); time.sleep(60)"
        subprocess.run([sys.executable, "-c", code])
    if verb == "daemon":
        code = "import os, time; os.fork() and os._exit(0); os.setsid(); "
        code += "x = bytearray(b'x') * (500 * 2**20); time.sleep(60)"
        subprocess.run([sys.executable, "-c", code])
        time.sleep(60)
    if verb == "copies":  # of pages that this process has already
        kept.append(bytearray(b"x") * 2**27)
        if not all([os.fork() for _ in range(4)]):
            time.sleep(1)
            os._exit(0)
        while True:
            try: os.wait()
            except ChildProcessError: break
        kept.clear()
    return 1.0

async def later(solution_str):
    return compute_score(solution_str)
"""
RIGHT = RewardResult(1.0, 1.0)


@pytest.fixture
def later(tmp_path: Path) -> str:
    (tmp_path / "later.py").write_text(LATER)
    return f"{tmp_path}/later.py:compute_score"


@pytest.fixture
def hoards(tmp_path: Path) -> str:
    (tmp_path / "hoards.py").write_text(HOARDS)
    return f"{tmp_path}/hoards.py"


def item(solution_str: str) -> RewardItem:
    return RewardItem("test", solution_str, "1")


def make_pool(function: str, num_workers: int = 1, timeout_seconds: float = 10.0, **options: float) -> RewardPool:
    return RewardPool(
        function, num_workers=num_workers, timeout_seconds=timeout_seconds, correct_threshold=1.0, **options
    )


def test_calls_wait_together_and_keep_their_order(later: str) -> None:
    with make_pool(later, concurrency=32) as pool:
        start = time.monotonic()
        outcomes = pool.score([item(f"wait {0.3 - 0.002 * i}") for i in range(128)])
        assert time.monotonic() - start < 5.0  # 22 s one after the other
        assert outcomes == [RIGHT] * 128
        numbers = pool.score([item(f"number {i}") for i in range(300)])
    assert [outcome.reward for outcome in numbers if isinstance(outcome, RewardResult)] == list(map(float, range(300)))


@pytest.mark.parametrize(("concurrency", "num_workers"), [(1, 1), (5, 1), (4, 2)])
def test_no_more_calls_at_a_time_than_the_limit(later: str, concurrency: int, num_workers: int) -> None:
    with make_pool(later, num_workers, concurrency=concurrency) as pool:
        outcomes = pool.score([item("most")] * (3 * concurrency * num_workers))
    seen = {outcome.reward for outcome in outcomes if isinstance(outcome, RewardResult)}
    assert max(seen) == concurrency


@pytest.mark.parametrize(
    ("bad", "message", "is_late"),
    [
        ("wait 1000", "timed out after 0.6 s", True),
        pytest.param("block 1000", "timed out after 0.6 s", True, marks=pytest.mark.slow),
        pytest.param("block 0.9", "timed out after 0.6 s", True, marks=pytest.mark.slow),
        pytest.param("regex", "timed out after 0.6 s", True, marks=pytest.mark.slow),
        pytest.param("stubborn", "timed out after 0.6 s", True, marks=pytest.mark.slow),
        pytest.param("exit", "the reward process died: exit code 3", False, marks=pytest.mark.slow),
        pytest.param("segv", "the reward process died: SIGSEGV", False, marks=pytest.mark.slow),
        ("raise no good", "ValueError: no good", False),
        ("quit now", "SystemExit: now", False),
        pytest.param("cancel me", "asyncio.exceptions.CancelledError: me", False, marks=pytest.mark.slow),
    ],
)
def test_a_bad_item_harms_none_that_is_scored_beside_it(later: str, bad: str, message: str, is_late: bool) -> None:
    items = [item("wait 0.25")] * 10
    with make_pool(later, timeout_seconds=0.6, concurrency=8) as pool:
        start = time.monotonic()
        outcomes = pool.score([*items, item(bad), *items])
        assert time.monotonic() - start < 12.0
        assert pool.score([item("x")]) == [RIGHT]
    failed = outcomes.pop(10)
    assert isinstance(failed, Failure) and failed.message.startswith(message) and failed.timed_out == is_late
    assert failed.source == "reward" and outcomes == [RIGHT] * 20


@pytest.mark.slow
def test_many_bad_items_of_each_kind_fail_and_no_other(later: str) -> None:
    verbs = ["wait 1000", "x", "block 1000", "wait 0.1", "exit", "wait 0.1", "raise no", "x", "stubborn", "wait 0.1"]
    with make_pool(later, 2, timeout_seconds=0.5, concurrency=6) as pool:
        outcomes = pool.score([item(verb) for verb in verbs * 2])
    assert [outcome == RIGHT for outcome in outcomes] == [i % 2 == 1 for i in range(20)]


def test_a_cancelled_call_keeps_its_process(later: str) -> None:
    with make_pool(later, timeout_seconds=0.3) as pool:
        pool.score([item("most")])
        pool.score([item("wait 1000")] * 9)
        assert pool.score([item("most")]) == [RewardResult(9.0, 1.0)]


def test_closing_while_calls_wait(later: str) -> None:
    pool = make_pool(later, timeout_seconds=100.0)
    pending = pool.submit_batch([item("wait 1000")] * 40)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 5.0
    with raises(RewardError, "reward pool"):
        pending.result(timeout=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compute_score", "later"])
def test_a_function_that_grows_is_killed_and_named(hoards: str, name: str) -> None:
    with make_pool(f"{hoards}:{name}", 2, memory_limit_mb=300) as pool:
        outcomes = pool.score([item("x")] * 10 + [item("hoard")] + [item("x")] * 10)
    failed = outcomes.pop(10)
    assert isinstance(failed, Failure) and outcomes == [RIGHT] * 20
    assert "reward.memory_limit_mb=300" in failed.message


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["child", "daemon"])
def test_memory_of_what_a_function_starts_counts(hoards: str, verb: str) -> None:
    start = time.monotonic()
    with make_pool(f"{hoards}:compute_score", timeout_seconds=60.0, memory_limit_mb=300) as pool:
        [failed, right] = pool.score([item(verb), item("x")])
    assert isinstance(failed, Failure) and right == RIGHT
    assert "reward.memory_limit_mb=300" in failed.message
    assert time.monotonic() - start < 45.0


@pytest.mark.slow
def test_memory_that_processes_share_counts_once(hoards: str) -> None:
    with make_pool(f"{hoards}:compute_score", timeout_seconds=60.0, memory_limit_mb=400) as pool:
        assert pool.score([item("copies")]) == [RIGHT]  # 5 processes that each have 128 MB, of the same pages


def test_a_limit_of_memory_needs_processes(hoards: str) -> None:
    for function, num_workers in ((f"{hoards}:compute_score", 0), (lambda solution_str: 1.0, 0)):
        with raises(ConfigError, "reward.memory_limit_mb", change=re.compile("reward.num_workers=1")):
            RewardPool(function, num_workers=num_workers, timeout_seconds=1.0, correct_threshold=1.0, memory_limit_mb=1)
    lock = threading.Lock()
    with raises(ConfigError, "reward.memory_limit_mb"):
        make_pool(lambda solution_str: lock, memory_limit_mb=300)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_process_that_leaks_is_replaced_and_no_item_fails(hoards: str) -> None:
    with make_pool(f"{hoards}:compute_score", memory_limit_mb=200) as pool:
        assert pool.score([item("leak")] * 24) == [RIGHT] * 24  # 400 MB in all


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 8])
def test_processes_that_die_in_a_row_end_the_pool_with_the_item(later: str, concurrency: int) -> None:
    with make_pool(later, 2, concurrency=concurrency) as pool:
        assert pool.score([item("x")]) == [RIGHT]
        for text in ("exit", "x"):
            with raises(
                RewardError, re.compile(r"later\.py:compute_score$"), found=re.compile(r"^20 .*'exit'.*exit code 3$")
            ):
                pool.score([item(text)] * 30)
