# SPDX-License-Identifier: Apache-2.0
"""Requirements of every service: it starts or the run does not, and later it neither stops nor delays the run."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.raising import raises
from whet.errors import ConfigError
from whet.tracking import service
from whet.tracking.service import BackgroundTracker, TrackedRun, open_services
from whet.tracking.tracker import NO_TABLES, JsonlTracker, Tables

MADE: list[Diary] = []


class Diary:
    """A service that remembers."""

    def __init__(self, run: TrackedRun) -> None:
        self.run, self.run_id, self.last_step = run, run.run_id or f"run {len(MADE)}", -1
        self.steps: list[tuple[int, dict[str, float], list[str]]] = []
        self.closed: list[bool] = []
        MADE.append(self)

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        self.steps.append((step, dict(metrics), list(tables)))

    def close(self, failed: bool = False) -> None:
        self.closed.append(failed)


class KnowsThree(Diary):
    """A service that has the run up to step 3."""

    def __init__(self, run: TrackedRun) -> None:
        super().__init__(run)
        self.last_step = 3


class Broken(Diary):
    """A service that is down every second time."""

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        super().log(step, metrics, tables)
        if step % 2:
            raise OSError("no route to host")


class Stuck(Diary):
    """A service that never answers."""

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        time.sleep(60)


def refuses(run: TrackedRun) -> Diary:
    raise ValueError("project names end in a letter")


def exits(run: TrackedRun) -> Diary:
    raise SystemExit("no key, no entry")


def advises(run: TrackedRun) -> Diary:
    raise ConfigError("set THE_KEY")


def never_starts(run: TrackedRun) -> Diary:
    time.sleep(60)
    raise AssertionError


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    MADE.clear()
    return TrackedRun(tmp_path, "project", "name", {"rollout": {"n": 4}})


def use(monkeypatch: pytest.MonkeyPatch, **services: Callable[[TrackedRun], Diary]) -> None:
    """Replaces services by the objects of this file."""
    made = {name: SimpleNamespace(load=partial(lambda each: each, each)) for name, each in services.items()}
    monkeypatch.setattr(service, "TRACKERS", made)


def test_a_class_of_a_file_is_a_tracker(run: TrackedRun, tmp_path: Path) -> None:
    source = "class Mine:\n    run_id, last_step = 'mine', -1\n    def __init__(self, run):\n        self.run = run\n"
    source += "    def log(self, step, metrics, tables):\n"
    source += "        (self.run.folder / 'mine').write_text(f'{step} {metrics}')\n"
    (tmp_path / "own.py").write_text(source + "    def close(self, failed):\n        pass\n")
    [tracker] = open_services([f"{tmp_path}/own.py:Mine"], run)
    tracker.log(3, {"a": 0.5})
    tracker.close()
    assert (tmp_path / "mine").read_text() == "3 {'a': 0.5}"


def test_steps_arrive_in_order_with_their_tables(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, wandb=Diary)
    [tracker] = open_services(["wandb"], run)
    tracker.log(0, {"val/accuracy": 0.5})
    tracker.log(1, {"x": 1.0}, {"generations/rollout": [{"prompt": "1+1="}]})
    tracker.close()
    assert MADE[0].steps == [(0, {"val/accuracy": 0.5}, []), (1, {"x": 1.0}, ["generations/rollout"])]
    assert MADE[0].closed == [False]


def test_what_the_service_has_it_is_not_given_again(run: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, wandb=KnowsThree)
    [tracker] = open_services(["wandb"], run)
    for step in range(6):
        tracker.log(step, {"x": 1.0})
    tracker.close(failed=True)
    assert [step for step, *_ in MADE[0].steps] == [4, 5] and MADE[0].closed == [True]


def test_a_resumed_run_is_the_same_to_each_service_and_a_fresh_one_is_not(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, wandb=Diary, mlflow=Diary)

    def ids(steps_done: int) -> list[str]:
        before = len(MADE)
        again = TrackedRun(run.folder, run.project, run.name, run.config, steps_done)
        for tracker in open_services(["wandb", "mlflow"], again):
            tracker.close()
        return [made.run_id for made in MADE[before:]]

    assert ids(-1) == ["run 0", "run 1"]
    assert json.loads((run.folder / "trackers.json").read_text()) == {"wandb": "run 0", "mlflow": "run 1"}
    assert ids(7) == ["run 0", "run 1"]
    assert ids(-1) == ["run 4", "run 5"]
    assert ids(7) == ["run 4", "run 5"]


@pytest.mark.parametrize("content", ["", "[1]", "7", '{"wandb": ', "\x00"])
def test_names_that_cannot_be_read_give_a_new_run(
    content: str, run: TrackedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, wandb=Diary)
    (run.folder / "trackers.json").write_text(content)
    [tracker] = open_services(["wandb"], replace(run, steps_done=3))
    tracker.close()
    assert MADE[-1].run.run_id is None and "trackers.json cannot be read" in caplog.text


def test_a_service_that_lacks_steps_of_a_resumed_run_is_told_them_from_its_files(
    run: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, wandb=Diary, mlflow=KnowsThree)
    for name, metric in (("metrics.jsonl", "loss"), ("timings.jsonl", "time/step")):
        file = JsonlTracker(run.folder / name)
        for step in range(1, 6):
            file.log(step, {metric: step / 4, "empty": float("nan")})
        file.close()
    resumed = TrackedRun(run.folder, run.project, run.name, run.config, steps_done=5)
    for tracker in open_services(["wandb", "mlflow"], resumed):
        tracker.log(6, {"loss": 1.5})
        tracker.close()
    told = [(step, {"loss": step / 4, "time/step": step / 4}, []) for step in range(1, 6)] + [(6, {"loss": 1.5}, [])]
    assert MADE[0].steps == told and MADE[1].steps == told[3:]


@pytest.mark.parametrize(
    ("made", "key", "found"),
    [
        (refuses, "trainer.logger", r"wandb .*\(ValueError: project names end in a letter\)"),
        (exits, "trainer.logger", r"wandb .*\(RuntimeError: SystemExit\('no key, no entry'\)\)"),
        (advises, "set THE_KEY", ""),
        (never_starts, "trainer.logger", r"wandb .*\b0 s\b"),
    ],
)
def test_what_does_not_start_is_refused_and_the_others_are_closed(
    made: Callable[[TrackedRun], Diary], key: str, found: str, run: TrackedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, mlflow=Diary, wandb=made)
    monkeypatch.setattr(service, "START_SECONDS", 0.3)
    with raises(ConfigError, key, found=re.compile(found)):
        open_services(["mlflow", "wandb"], run)
    assert MADE[0].closed == [True]


def test_a_failure_on_the_way_is_said_once_and_counted(run: TrackedRun, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    tracker = BackgroundTracker("mlflow", lambda: Broken(run))
    for step in range(6):
        tracker.log(step, {})
    tracker.close()
    assert [step for step, *_ in MADE[0].steps] == [0, 1, 2, 3, 4, 5] and MADE[0].closed == [False]
    assert [tuple(map(str, record.args or ())) for record in caplog.records] == [
        ("mlflow", "OSError", "no route to host"),
        ("mlflow", "3", "7"),
    ]


def test_a_service_that_hangs_holds_up_neither_steps_nor_the_end(
    run: TrackedRun, caplog: pytest.LogCaptureFixture
) -> None:
    started = time.monotonic()
    tracker = BackgroundTracker("wandb", lambda: Stuck(run), close_seconds=0.2)
    for step in range(3):
        tracker.log(step, {})
    tracker.close()
    assert time.monotonic() - started < 10
    assert [record.args for record in caplog.records] == [("wandb", 0.2)]
