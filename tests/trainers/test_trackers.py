# SPDX-License-Identifier: Apache-2.0
"""Data that runs pass to trackers: curves, tables of responses, and the end state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.plugins.trackers.test_services import NAME, READERS
from whet.config import SFTConfig, TrainConfig, checks, load_config
from whet.tracking import service
from whet.tracking.service import TrackedRun
from whet.tracking.tracker import NO_TABLES, Tables
from whet.trainers.build import train
from whet.trainers.sft import train_sft

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]
ROOT = Path(__file__).parents[2]
MADE: list[Diary] = []


class Diary:
    """A service that remembers."""

    def __init__(self, run: TrackedRun) -> None:
        self.run, self.run_id, self.last_step = run, "mine", -1
        self.metrics: dict[int, dict[str, float]] = {}
        self.tables: dict[int, Tables] = {}
        self.closed: list[bool] = []
        MADE.append(self)

    def log(self, step: int, metrics: Any, tables: Tables = NO_TABLES) -> None:
        self.metrics[step], self.tables[step] = metrics, tables

    def close(self, failed: bool = False) -> None:
        self.closed.append(failed)


@pytest.fixture(autouse=True)
def diary(monkeypatch: pytest.MonkeyPatch) -> None:
    MADE.clear()
    monkeypatch.setattr(service, "TRACKERS", defaultdict(lambda: SimpleNamespace(load=lambda: Diary)))
    monkeypatch.setattr(checks, "find_spec", lambda _: checks.__spec__)  # installed, wherever this runs


def sevens(solution_str: str) -> float:
    if solution_str.startswith("a"):
        raise ValueError("no a")
    return solution_str.count("7") / 6


def test_a_run_hands_over_its_config_its_numbers_and_a_few_of_its_answers(
    train_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in additions[:3]))
    overrides = {"trainer.logger": ["jsonl", "wandb"], "data.val_files": [str(held_out)], "trainer.val_freq": 2}
    config = train_config({**overrides, "trainer.table_rows": 6, "trainer.project_name": "sums"})
    run = train(config, reward=sevens, data=additions)
    [made] = MADE
    assert (made.run.folder, made.run.project, made.run.name) == (tmp_path / "run", "sums", "default")
    assert made.run.config == config.model_dump(mode="json") and made.run.steps_done == -1
    assert made.closed == [False]
    for record in run.history:
        step = int(record["step"])
        assert {"step": step, **made.metrics[step]}.items() >= record.items() and "time/step" in {*made.metrics[1]}
    assert {step: [*tables] for step, tables in made.tables.items()} == {
        0: ["generations/validation"],
        1: ["generations/rollout"],
        2: ["generations/rollout", "generations/validation"],
    }
    assert len(made.tables[0]["generations/validation"]) == 3  # all there are
    written = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_000001.jsonl").open()]
    shown = made.tables[1]["generations/rollout"]
    of_four = [written[at] for at in (0, 4, 8, 12, 1, 5)]  # the first answer of each of four groups, then the second
    assert [(row["uid"], row["prompt"], row["response"], row["ground_truth"], row["reward"]) for row in shown] == [
        (each["uid"], each["prompt"], each["response"], each["ground_truth"], each["reward"]) for each in of_four
    ]
    assert [row["failure"] for row in shown] == [
        f"reward: {each['failure']['message']}" if each["failure"] else "" for each in of_four
    ]


def test_a_run_that_fails_says_so(train_config: MakeConfig, additions: Rows, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("def fit(run):\n    raise ZeroDivisionError\n")
    config = train_config({"trainer.logger": "wandb", "trainer.loop": f"{tmp_path}/failing.py:fit"})
    with pytest.raises(ZeroDivisionError):
        train(config, reward=sevens, data=additions)
    assert MADE[0].closed == [True]


def test_a_dry_run_tells_nobody(train_config: MakeConfig, additions: Rows) -> None:
    train(train_config({"trainer.logger": "wandb"}), reward=sevens, data=additions, dry_run=True)
    assert MADE == []


def sft_config(model_folder: Path, run_dir: Path, logger: str) -> SFTConfig:
    small: dict[str, Any] = {
        "model.path": str(model_folder),
        "data.apply_chat_template": False,
        "data.train_batch_size": 4,
        "data.max_length": 32,
        "trainer.total_steps": 3,
        "trainer.save_freq": 1,
        "trainer.run_dir": str(run_dir),
        "trainer.logger": [logger, "jsonl"],
    }
    return load_config(SFTConfig, None, small, given={"data"}).config


@pytest.mark.slow
def test_fine_tuning_too(model_folder: Path, additions: Rows, tmp_path: Path) -> None:
    examples = [{"prompt": row["prompt"], "response": row["answer"]} for row in additions]

    def stop(run: Any) -> None:
        if run.step == 2:
            raise KeyboardInterrupt

    config = sft_config(model_folder, tmp_path / "run", "wandb")
    with pytest.raises(KeyboardInterrupt):
        train_sft(config, data=examples, callbacks=[stop])
    run = train_sft(config, data=examples)
    first, second = MADE
    assert (first.closed, second.closed) == ([True], [False])
    assert second.run.steps_done == 1 and second.run.run_id == "mine"
    assert [*second.metrics] == [1, 2, 3]  # the first from the run's files
    assert first.metrics[2]["sft/loss"] == second.metrics[2]["sft/loss"] == run.history[1]["sft/loss"]


@pytest.mark.slow
def test_every_service_has_the_curve_of_a_run_that_was_killed(model_folder: Path, tmp_path: Path) -> None:
    """`whet train`, killed after step 6 and a checkpoint of step 4, then resumed to step 8."""
    services = ["tensorboard", "wandb", "mlflow", "swanlab"]  # those of this environment
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(
        "import os, signal, time\n\n\n"
        "def sevens(solution_str):\n    return solution_str.count('7') / 6\n\n\n"
        "def kill(run, step, numbers):\n"
        "    if step == 6 and not os.path.exists('killed'):\n"
        "        open('killed', 'w').close()\n        time.sleep(3)\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    words = f"""
        model.path={model_folder} data.apply_chat_template=false data.train_batch_size=4 rollout.n=4
        data.max_prompt_length=16 data.max_response_length=6 data.train_files=rows.jsonl data.val_files=rows.jsonl
        data.val_max_prompts=4 reward.function=mine.py:sevens actor.optim.lr=1e-3 trainer.total_steps=8
        trainer.save_freq=4 trainer.run_dir=run trainer.callbacks=[mine.py:kill] trainer.project_name=project
        trainer.logger=[console,jsonl,{",".join(services)}] trainer.experiment_name=sevens
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "SWANLAB_MODE": "offline"}
    command = [sys.executable, "-m", "whet", "train", *words.split()]
    for code in (-signal.SIGKILL, 0):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
        assert done.returncode == code, done.stderr[-3000:]
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    expected = {record["step"]: record[NAME] for record in records if NAME in record}
    assert [*expected] == [1, 2, 3, 4, 5, 6, 7, 8]
    for service_name in services:
        curve, told = READERS[service_name](tmp_path / "run")
        assert len(curve) == 8 and dict(curve) == pytest.approx(expected), service_name
        assert {5, 6, 7, 8} <= told.keys() and {len(table) for table in told.values()} <= {4, 8}, service_name
