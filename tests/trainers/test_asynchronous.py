# SPDX-License-Identifier: Apache-2.0
"""Training that samples while it trains: the trained groups, their age, and the result after a kill or a stop."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.config import TrainConfig
from whet.rollout.driver import Driver
from whet.trainers import build
from whet.trainers.build import train

MakeConfig = Callable[..., TrainConfig]
APART = {"train": {"roles": ["actor"]}, "sample": {"roles": ["rollout"]}}
STALE = {"cluster.placement": APART, "algorithm.correction.weight": "importance", "trainer.log_rollouts": 1}
BATCH, STEPS = 4, 30
ONLY_AHEAD = {  # metrics of what is sampled ahead, which a synchronous run does not have
    *("staleness/mean", "staleness/max", "staleness/stale_fraction"),
    *("rollout/outstanding_groups", "rollout/ready_groups", "rollout/unused_tokens"),
}


def pays_for_sevens(solution_str: str) -> float:
    return float(solution_str.count("7"))


def trained(run_dir: Path) -> list[list[dict[str, Any]]]:
    """The trajectories of each step, from rollouts/."""
    files = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def check_trained(run_dir: Path, *, steps: int, batch: int, rows: int, most: int) -> list[int]:
    """Every prompt was trained on once, in the order of the data, by tokens of the last `most` versions.  Returns how
    many versions the oldest token of each trajectory is behind."""
    by_step = trained(run_dir)
    uids = [[row["uid"].rpartition(":")[0] for row in rows if row["uid"].endswith(":0")] for rows in by_step]
    flat = [uid for step in uids for uid in step]
    assert [len(step) for step in uids] == [batch] * steps
    assert len(set(flat)) == len(flat), "a prompt is trained on once"
    places = [int(uid.partition(":")[0]) for uid in flat]
    assert places == sorted(places) and places == [number // rows for number in range(len(flat))], "none is left out"
    lags = []
    for number, step in enumerate(by_step):
        for row in step:
            runs = row.get("policy_versions", [[[row["policy_version"], row["tokens"]]]])
            lags.append(number - min(version for turn in runs for version, _ in turn))
    assert min(lags) >= 0 and max(lags) <= most
    return lags


@pytest.mark.slow
@pytest.mark.parametrize("k", [0.5, 1, 2])
def test_each_prompt_is_trained_on_once_and_within_the_bound(
    k: float, train_config: MakeConfig, additions: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in additions[:3]))
    validated = {"data.val_files": [str(tmp_path / "val.jsonl")], "trainer.val_freq": 3, "trainer.save_freq": 5}
    config = train_config({**STALE, **validated, "rollout.max_staleness": k, "trainer.total_steps": 9})
    run = train(config, reward=pays_for_sevens, data=additions)
    size, rows = config.data.train_batch_size, len(additions)
    lags = check_trained(run.run_dir, steps=9, batch=size, rows=rows, most=-(-k // 1))
    assert max(lags) > 0, "nothing was sampled ahead"
    steps = [line for line in run.history if "staleness/max" in line]
    assert len(steps) == 9 and steps[0]["staleness/max"] == 0 and steps[-1]["staleness/max"] > 0
    assert all(line["correction/weight"] > 0 for line in steps)
    assert [line["step"] for line in run.history if "val/accuracy" in line] == [0, 3, 6, 9]


@pytest.fixture
def command(model_folder: Path, additions: list[dict[str, str]], tmp_path: Path) -> list[str]:
    """A run of `whet train` as a user starts it."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in additions))
    (tmp_path / "sevens.py").write_text("def pay(solution_str): return float(solution_str.count('7'))\n")
    keys = {
        "model.path": model_folder,
        "data.train_files": tmp_path / "train.jsonl",
        "data.prompt_key": "prompt",
        "data.answer_key": "answer",
        "data.apply_chat_template": "false",
        "data.train_batch_size": BATCH,
        "data.max_prompt_length": 16,
        "data.max_response_length": 48,
        "reward.function": f"{tmp_path / 'sevens.py'}:pay",
        "rollout.n": 2,
        "rollout.max_staleness": 1.5,
        "algorithm.adv_estimator": "grpo",
        "algorithm.correction.weight": "importance",
        "cluster.placement": "{train: {roles: [actor]}, sample: {roles: [rollout]}}",
        "trainer.total_steps": STEPS,
        "trainer.save_freq": 2,
        "trainer.save_limit": 2,
        "trainer.run_dir": tmp_path / "run",
    }
    whet = [sys.executable, "-m", "whet", "train"]
    return [*whet, *(f"{key}={value}" for key, value in keys.items())]


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until_step(process: subprocess.Popen[str], metrics: Path, step: int) -> bool:
    """Waits until a step is logged; False where the run ended first."""
    deadline = time.monotonic() + 120
    while lines(metrics) < step:
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "no new step within 120 s"
        time.sleep(0.005)
    return True


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_nothing_is_lost_or_doubled_by_twenty_kills(command: list[str], tmp_path: Path) -> None:
    """Of one run, or of several where a run is over before its next kill."""
    draw, killed, resumed = random.Random(3), 0, 0
    while killed < 20:
        run_dir = tmp_path / f"killed_after_{killed}"
        again = [*command, f"trainer.run_dir={run_dir}"]
        for _ in range(20 - killed):
            said, was_killed = run_and_kill(again, run_dir / "metrics.jsonl", draw)
            killed += was_killed
            resumed += re.search("groups .* from the checkpoint", said) is not None
            if not was_killed:
                break
        done = subprocess.run(again, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        check_trained(run_dir, steps=STEPS, batch=BATCH, rows=20, most=2)
        steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, STEPS + 1))
    assert resumed >= 5, (killed, resumed)


def run_and_kill(command: list[str], metrics: Path, draw: random.Random) -> tuple[str, bool]:
    """Starts a run and kills it within its next steps.  Returns its output, and False where it was over before."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if until_step(process, metrics, min(lines(metrics) + draw.randint(0, 2), STEPS - 1)):
        time.sleep(draw.random() * 0.3)
    process.send_signal(signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGKILL, 0), said
    return said, process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_without_staleness_the_bits_are_those_of_the_synchronous_run(
    train_config: MakeConfig, additions: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver of asynchronous runs with k = 0, through metrics, rollouts and weights, with a filter and its
    refills."""
    keys = {
        "trainer.total_steps": 4,
        "trainer.log_rollouts": 1,
        "trainer.save_freq": 4,
        "algorithm.filter.name": "dapo",
        "algorithm.filter.max_refills": 2,
        "actor.mini_batch_size": 2,
    }

    def bits(name: str) -> dict[str, bytes]:
        config = train_config({**keys, "trainer.run_dir": str(tmp_path / name)})
        run = train(config, reward=pays_for_sevens, data=additions)
        assert run.rollouts.driver._in_thread == (name == "thread")
        drawn = [*(run.run_dir / "rollouts").glob("step_*.jsonl"), *run.run_dir.rglob("*.safetensors")]
        kept = {str(path.relative_to(run.run_dir)): path.read_bytes() for path in drawn}
        history = [{key: line[key] for key in line.keys() - ONLY_AHEAD} for line in run.history]
        return {**kept, "metrics": json.dumps(history, sort_keys=True).encode()}

    own = bits("loop")
    monkeypatch.setattr(build, "Driver", lambda *given, in_thread: Driver(*given, in_thread=True))
    assert bits("thread") == own


INSISTENT = """
from whet.plugins.agents.shipped import Calculator

class Insistent(Calculator):
    '''The calculator for a model that knows nothing: the first two answers are questions for their lengths.'''

    def __init__(self, prompt):
        super().__init__(prompt)
        self.asked = 0

    def step(self, answer):
        self.asked += 1
        return super().step(f"<calc>{len(answer)}*3</calc>" if self.asked < 3 else answer.replace("<calc>", ""))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_episodes_of_several_turns_begin_again_after_a_kill(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "insistent.py").write_text(INSISTENT)
    more = [
        f"environment.name={tmp_path}/insistent.py:Insistent",
        "environment.max_turn_tokens=8",
        "trainer.log_rollouts=1",
    ]
    command, metrics, again = [*command, *more], tmp_path / "run" / "metrics.jsonl", 0
    for _ in range(8):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        until_step(process, metrics, min(lines(metrics) + 3, STEPS))
        process.send_signal(signal.SIGKILL)
        said, _ = process.communicate(timeout=60)
        found = re.search(r"(\d+) episodes ", said)
        again += int(found[1]) if found else 0
        if again or process.returncode == 0:
            break
    assert again > 0
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    check_trained(tmp_path / "run", steps=STEPS, batch=BATCH, rows=20, most=2)
    for row in (row for step in trained(tmp_path / "run") for row in step):
        assert row["failure"] is None and row["turns"] == 3
        said_by = [each["observation"] for each in row["steps"]]
        told = [[{"role": "tool", "content": str(3 * len(each["action"]))}] for each in row["steps"][:2]]
        assert said_by == [[], *told]


@pytest.mark.slow
def test_a_stop_saves_what_was_sampled_ahead(command: list[str], tmp_path: Path) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert until_step(process, metrics, 5)
    os.kill(process.pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("groups .* from the checkpoint", done.stdout + done.stderr)
    check_trained(tmp_path / "run", steps=STEPS, batch=BATCH, rows=20, most=2)
