# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are written without a request, and the log of a run that starts anew."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises
from whet.config import SFTConfig, TrainConfig, load_config
from whet.errors import ConfigError
from whet.planning import machine
from whet.trainers import frame
from whet.trainers.build import train
from whet.trainers.sft import train_sft

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]
AUTO = {"trainer.save_freq": "auto", "trainer.total_steps": 4, "trainer.save_limit": None}


def length(solution_str: str) -> float:
    return float(len(solution_str))


def saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in (run_dir / "checkpoints").glob("global_step_*"))


class Killed(BaseException):
    """An end without any order."""


def killed_at(config: TrainConfig, step: int, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs until the line of `step` is in metrics.jsonl, and nothing more."""
    from whet.trainers.run import Run

    def check(run: Run, *_: object) -> None:
        if run.step == step:
            raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Run, "check_health", check)
        train(config, reward=length, data=rows)


def test_the_default_saves_after_the_first_step_and_at_the_end(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    assert TrainConfig().trainer.save_freq == "auto"
    train(train_config(AUTO), reward=length, data=additions)
    assert saved(tmp_path / "run") == [1, 4]


def test_ten_minutes_after_a_checkpoint_the_next_step_is_saved(
    train_config: MakeConfig, additions: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a step takes 200 seconds: steps end at 200, 400, ..., 1,600; saves at 200, 1,000 and the end,
    since 800 is not more than ten minutes after 200."""
    now = 0.0

    class Clock:
        def __getattr__(self, name: str) -> Any:
            import time

            return (lambda: now) if name == "monotonic" else getattr(time, name)

    def tick(run: Any, *_: object) -> None:
        nonlocal now
        now = 200.0 * run.step

    monkeypatch.setattr(frame, "time", Clock())
    monkeypatch.setattr("whet.trainers.run.Run.check_health", lambda run, batch, metrics: None)
    monkeypatch.setattr("whet.trainers.run.Run.count_flops", tick)
    train(train_config({**AUTO, "trainer.total_steps": 8}), reward=length, data=additions)
    assert saved(tmp_path / "run") == [1, 5, 8]


@pytest.mark.slow
def test_a_number_and_zero_keep_their_meaning(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    train(train_config({**AUTO, "trainer.save_freq": 3}), reward=length, data=additions)
    assert saved(tmp_path / "run") == [3, 4]
    train(
        train_config({**AUTO, "trainer.save_freq": 0, "trainer.run_dir": str(tmp_path / "b")}),
        reward=length,
        data=additions,
    )
    assert saved(tmp_path / "b") == [4]


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_first_step_and_saves_no_other_at_once(
    train_config: MakeConfig, additions: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_at(train_config(AUTO), 3, additions, monkeypatch)
    assert saved(tmp_path / "run") == [1]
    run = train(train_config(AUTO), reward=length, data=additions)
    assert saved(tmp_path / "run") == [1, 4]
    assert [each["step"] for each in run.history] == [1, 2, 3, 4]
    whole = train(train_config({**AUTO, "trainer.run_dir": str(tmp_path / "whole")}), reward=length, data=additions)
    assert run.history == whole.history  # to the bit


def test_a_supervised_run_saves_so_too(model_folder: Path, tmp_path: Path) -> None:
    small: dict[str, Any] = {"model.path": str(model_folder), "data.apply_chat_template": False, "data.max_length": 16}
    small |= {"data.train_batch_size": 2, "trainer.total_steps": 3, "trainer.run_dir": str(tmp_path / "sft")}
    config = load_config(SFTConfig, None, small, given={"data"}).config
    train_sft(config, data=[{"prompt": "1+1=", "response": "2"}] * 4)
    assert saved(tmp_path / "sft") == [1, 3]


@pytest.mark.slow
def test_a_run_that_begins_anew_says_what_it_found(
    train_config: MakeConfig,
    additions: Rows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = train_config({**AUTO, "trainer.save_freq": 0})
    killed_at(config, 3, additions, monkeypatch)
    with caplog.at_level(logging.WARNING, "whet"):
        train(config, reward=length, data=additions)
    [line] = [text for text in caplog.messages if "no checkpoint" in text]  # a busy machine may be warned of too
    assert str(tmp_path / "run") in line and "3 lines of metrics.jsonl" in line and "3 files of rollouts" in line
    caplog.clear()
    with caplog.at_level(logging.WARNING, "whet"):  # a new folder has nothing to tell of
        train(train_config({**AUTO, "trainer.run_dir": str(tmp_path / "new")}), reward=length, data=additions)
    assert not [text for text in caplog.messages if "no checkpoint" in text]


def test_the_room_for_the_first_checkpoint_is_looked_at_when_it_is_written(
    train_config: MakeConfig, additions: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program has filled the disk since the start; nothing of the checkpoint is written, and the steps are in
    the log."""
    rooms = iter([2**40])
    monkeypatch.setattr(machine, "free_disk", lambda path: next(rooms, 100))
    with raises(ConfigError, "disk", found=re.compile("checkpoint"), expected=re.compile(r"\b100\b")):
        train(train_config(AUTO), reward=length, data=additions)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "failed"
