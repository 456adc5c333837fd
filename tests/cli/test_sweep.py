# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.cli.test_runs import whet
from tests.raising import raises
from tests.tracking.test_runs import make_run
from whet.cli import train
from whet.cli.train import members
from whet.errors import ConfigError
from whet.tracking.runs import write_state


def test_the_last_sweep_changes_fastest_and_folders_are_named_by_the_values() -> None:
    found = members(["rollout.n=4", "actor.optim.lr=1e-5,1e-6", "trainer.seed=range(1,3)"])
    assert [each.name for each in found] == [
        "lr-1e-05_seed-1",
        "lr-1e-05_seed-2",
        "lr-1e-06_seed-1",
        "lr-1e-06_seed-2",
    ]
    assert found[1].overrides == ["rollout.n=4", "actor.optim.lr=1e-05", "trainer.seed=2"]
    same = members(["actor.optim.lr=choice(1,2)", "critic.optim.lr=3,4"])
    assert same[0].name == "actor.optim.lr-1_critic.optim.lr-3"
    paths = [each.name for each in members(["model.path=a/b,a-b"])]
    assert paths[1] == "path-a-b" and paths[0].startswith("path-a-b_") and len(paths[0]) == 15
    lists = members(["actor.optim.betas=[0.9,0.9],[0.9,0.99]"])
    assert [each.values["actor.optim.betas"] for each in lists] == ["[0.9,0.9]", "[0.9,0.99]"]


@pytest.mark.parametrize(
    ("word", "key", "found"),
    [
        ("trainer.seed=1", "-m", ""),
        ("trainer.run_dir=a,b", "-m", "trainer.run_dir"),
        ("actor.optim.lr=interval(0,1)", "actor.optim.lr=interval(0,1)", ""),
    ],
)
def test_what_is_no_sweep_is_an_error(word: str, key: str, found: str) -> None:
    with raises(ConfigError, key, found=re.compile(found)):
        members([word])


class Process:
    """A run that fails where its seed is 2 and there is no file `mended`, and else is finished."""

    begun: ClassVar[list[str]] = []

    def __init__(self, command: list[str]) -> None:
        self.begun.append(command[-2])
        folder = Path(command[-1].partition("=")[2].strip('"'))
        if not folder.exists():
            make_run(folder, {"step": 3, "val/accuracy": 0.5})
        failed = self.begun[-1].endswith("=2") and not Path("mended").exists()
        write_state(folder, "failed" if failed else "finished", 3, ValueError("odd") if failed else None)

    def wait(self) -> int:
        return 0


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qwen25_folder: Path) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train.subprocess, "Popen", Process)
    monkeypatch.setattr(Process, "begun", [])
    Path("rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    data = [f"model.path={qwen25_folder}", "data.train_files=rows.jsonl", "data.val_files=rows.jsonl"]
    return ["train", "quickstart", *data, "trainer.total_steps=3", "trainer.run_dir=runs/s", "trainer.seed=1,2,3", "-m"]


@pytest.mark.slow
def test_a_failed_run_does_not_end_the_rest_and_a_second_call_goes_on(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert whet(*words) == 1
    assert Process.begun == ["trainer.seed=1", "trainer.seed=2", "trainer.seed=3"]
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "failed", "3/3", "0.5", "3"] in rows and ["3", "finished", "3/3", "0.5", "3"] in rows
    assert ["runs/s/seed-2:", "ValueError:", "odd"] in rows
    Path("mended").touch()
    assert whet(*words) == 0
    assert Process.begun[3:] == ["trainer.seed=2"]
    assert "run 1 of 3 is finished already: runs/s/seed-1" in capsys.readouterr().out
    assert whet(*[word.replace("steps=3", "steps=4") for word in words]) == 0
    assert len(Process.begun) == 7  # more steps are asked for
    Path("runs/s/seed-1/config.yaml").write_text("rollout: {n: 8}\n")
    assert whet(*words, "rollout.n=5") == 2
    told = capsys.readouterr().err
    assert told.startswith("ConfigError: runs/s/seed-1: ") and "\nrollout.n=5; expected 8 " in told
    assert len(Process.begun) == 7
    assert whet(*words, "rollout.n=5", "--dry-run") == 0  # as for a run, which writes nothing then


def test_a_signal_ends_the_sweep_after_the_run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    class Stopped(Process):
        def wait(self) -> int:
            signal.raise_signal(signal.SIGTERM)
            return 143

        def send_signal(self, number: int) -> None:
            sent.append(number)

    monkeypatch.setattr(train.subprocess, "Popen", Stopped)
    before: Any = signal.getsignal(signal.SIGTERM)
    assert whet(*words) == 143
    assert Stopped.begun == ["trainer.seed=1"] and sent == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_mistake_in_any_run_is_found_before_the_first_starts(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert whet(*words, "rollout.n=8,-1") == 2
    assert "rollout.n=-1; " in capsys.readouterr().err and Process.begun == []
