# SPDX-License-Identifier: Apache-2.0
"""Waiting threads beside other programs: when they spin less, and when the user gets a line about slow steps."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest
import torch

from whet import threads
from whet.threads import SPINS, Contention, waited_seconds


@pytest.fixture
def crowds(monkeypatch: pytest.MonkeyPatch) -> list[threading.Event]:
    """The crowds that were started."""
    started: list[threading.Event] = []

    def start() -> threading.Event:
        started.append(threading.Event())
        return started[-1]

    monkeypatch.setattr(threads, "crowd", start)
    monkeypatch.setenv("GOMP_SPINCOUNT", SPINS["GOMP_SPINCOUNT"])
    return started


def test_threads_spin_less_from_a_tenth_of_waiting_on_until_hardly_any_is_left(crowds: list[threading.Event]) -> None:
    seen = Contention()
    for waited, running in ((0.0, 0), (0.09, 0), (0.11, 1), (0.5, 1), (0.05, 1), (0.02, 0), (0.3, 1)):
        seen.note(1.0, waited)
        assert sum(not each.is_set() for each in crowds) == running, waited
    assert len(crowds) == 2
    seen.close()
    assert all(each.is_set() for each in crowds)


def test_spinning_that_the_user_set_stays(crowds: list[threading.Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    Contention().note(1.0, 0.9)
    monkeypatch.delenv("GOMP_SPINCOUNT")
    Contention().note(1.0, 0.9)
    assert crowds == []


def test_five_times_slower_steps_are_told_once_where_others_use_the_processors(crowds: list[threading.Event]) -> None:
    seen = Contention()
    assert [seen.note(2.0, 0.0) for _ in range(7)] == [""] * 7
    assert [seen.note(11.0, 0.0) for _ in range(6)] == [""] * 6  # longer responses, perhaps: nothing waits
    assert [seen.note(2.0, 0.0) for _ in range(7)] == [""] * 7
    assert [seen.note(9.9, 0.7) for _ in range(7)] == [""] * 7  # 4.95 times
    told = [seen.note(11.0, 0.7) for _ in range(8)]
    [line] = [each for each in told if each]
    assert "11 s" in line and "5.5 times" in line and "70%" in line and "OMP_NUM_THREADS=1" in line


def test_one_slow_step_is_not_told(crowds: list[threading.Event]) -> None:
    seen = Contention()
    assert not any(seen.note(40.0 if step == 8 else 2.0, 0.9) for step in range(12))


def test_seconds_without_a_processor_are_no_more_than_have_passed() -> None:
    began, before = time.monotonic(), waited_seconds()
    seen = Contention()
    torch.randn(300, 300) @ torch.randn(300, 300)
    seen.end()
    assert 0.0 <= waited_seconds() - before <= time.monotonic() - began


CROWD = """
import json, time, torch
from pathlib import Path
from whet.threads import crowd

def running():
    return {each.name for each in Path("/proc/self/task").iterdir()}

def shared():
    return [(x @ x.t()).tolist(), torch.get_num_threads()]

torch.set_num_threads(2)
x = torch.randn(200, 300)
alone, before = shared(), running()
until = crowd()
within = shared()
own = running() - before
until.set()
for _ in range(3000):  # looks, and not seconds: a machine that stands still for a while is no failure
    if not own & running():
        break
    time.sleep(0.01)
print(json.dumps({"own": sorted(own), "left": sorted(own & running()), "equal": alone == within}))
"""


def test_a_crowd_sleeps_ends_and_changes_no_number() -> None:
    """Runs in a process of its own: in this one other tests' threads begin meanwhile."""
    done = subprocess.run([sys.executable, "-c", CROWD], capture_output=True, text=True, timeout=120, check=True)
    seen = json.loads(done.stdout)
    assert seen["own"]
    assert seen["left"] == []
    assert seen["equal"]
