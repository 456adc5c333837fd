# SPDX-License-Identifier: Apache-2.0
"""NVTX ranges of the processes that train or sample, recorded by a stand-in for torch.cuda.nvtx."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from whet import phases
from whet.config import TrainConfig
from whet.phases import phase, profiling, span
from whet.tracking import profile
from whet.trainers.build import train

# A training and a rollout engine: the process that loads this file writes the names of its ranges beside it.
STANDIN = """
import os
import time
from contextlib import contextmanager
from pathlib import Path
import torch
from whet.engines.single import SingleEngine
from whet.rollout.native.engine import NativeEngine
from whet.tracking import profile

@contextmanager
def record(name):
    with Path(__file__).with_name(f"ranges-{os.getpid()}").open("a") as file:
        file.write(name + "\\n")
    yield

torch.cuda.nvtx.range, profile.has_nvtx = record, lambda: True

class Trains(SingleEngine):
    pass

class Samples(NativeEngine):
    def _step(self, module):
        time.sleep(0.1)  # a batch takes longer than its update: each step of the run has some of the sampling
        return super()._step(module)
"""
APART = {"train": {"processes": 2, "roles": ["actor"]}, "sample": {"roles": ["rollout"]}}


def pays(solution_str: str) -> float:
    return float(len(solution_str) % 2)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The ranges of this process: their names, and the threads that opened them."""
    found = list[tuple[str, str]]()

    @contextmanager
    def record(name: str) -> Iterator[None]:
        found.append((name, threading.current_thread().name))
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", record)
    monkeypatch.setattr(profile, "has_nvtx", lambda: True)
    return found


def test_ranges_of_all_threads_while_somebody_profiles(seen: list[tuple[str, str]]) -> None:
    def other() -> None:
        with phase("time/rollout"), span("decode"):
            pass

    with profiling(profile.in_range):
        thread = threading.Thread(target=other, name="samples")
        with span("forward"):
            thread.start()
            thread.join()
    with phase("time/step"), span("backward"):
        pass
    assert seen == [("forward", "MainThread"), ("rollout", "samples"), ("decode", "samples")]


def test_a_span_is_free_where_nobody_profiles() -> None:
    """Nothing is made for it."""
    assert span("forward") is span("backward") is phases.NOBODY


def test_without_a_gpu_no_range_is_pushed(seen: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "has_nvtx", lambda: False)
    with profiling(profile.in_range), span("forward"):
        pass
    assert not seen


@pytest.mark.slow
@pytest.mark.parametrize("steps", [[], [2]])
def test_the_driver_of_a_run_in_one_process(
    train_config: Callable[..., TrainConfig],
    additions: list[dict[str, str]],
    seen: list[tuple[str, str]],
    steps: list[int],
) -> None:
    """The ranges of the step that is profiled, each part inside its phase."""
    train(train_config({"trainer.profile": steps}), reward=pays, data=additions)
    count = Counter(name for name, _ in seen)
    if not steps:
        assert not seen
        return
    assert count["step"] == 1 and count["optimizer"] == 1  # one update
    assert count["backward"] >= 1 and count["forward"] >= count["backward"] and count["rollout step"] > 1
    names = [name for name, _ in seen]
    assert names[0] == "step" and names.index("rollout step") < names.index("forward") < names.index("backward")
    assert names.index("backward") < names.index("optimizer")
    assert {"rollout", "update", "sync"} <= set(names), sorted(count)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_ranks_that_train_and_a_worker_that_samples(
    train_config: Callable[..., TrainConfig], additions: list[dict[str, str]], tmp_path: Path, ahead: int
) -> None:
    """Each in a process of its own, whose trace has the same ranges."""
    file = tmp_path / "standin.py"
    file.write_text(STANDIN)
    settings: dict[str, Any] = {
        "actor.engine.name": f"{file}:Trains",
        "rollout.engine.name": f"{file}:Samples",
        "cluster.placement": APART,
        "trainer.profile": [2],
        "rollout.max_staleness": ahead,
        "trainer.total_steps": 3,
    }
    if ahead:
        settings["algorithm.correction.weight"] = "importance"
    run = train(train_config(settings), reward=pays, data=additions)
    by_process = [Counter(each.read_text().splitlines()) for each in sorted(tmp_path.glob("ranges-*"))]
    trains = [each for each in by_process if each["optimizer"]]
    samples = [each for each in by_process if each["rollout step"]]
    assert len(trains) == 2 and len(samples) == 1 and not trains[0]["rollout step"]
    for each in trains:
        assert each["optimizer"] == 1 and each["backward"] >= 1 and each["forward"] >= each["backward"]
        assert each["weight sync"] == 1
    assert samples[0]["rollout"] >= 1 and samples[0]["weight sync"] == 1
    traces = sorted(path.name for path in (run.run_dir / "profile").glob("*.gz"))
    names = ("sample_0.", "train_0.", "train_1.", "")
    assert traces == sorted(f"step_000002.{name}trace.json.gz" for name in names)
