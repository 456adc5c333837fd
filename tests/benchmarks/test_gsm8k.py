# SPDX-License-Identifier: Apache-2.0
"""SFT and GRPO on GSM8K by one command that goes on where it was cut off."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gsm8k
from whet.plugins.lessons.init_model import init_model

ROOT = Path(__file__).parents[2]
ROWS = [
    {"question": f"What is {a} plus {a}?", "answer": f"It is <<{a}+{a}={2 * a}>>{2 * a}.\n#### {2 * a}"}
    for a in range(8)
]


def test_examples_are_prompts_of_the_recipe_and_solutions_without_marks(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    gsm8k.write_examples(tmp_path / "train.jsonl", tmp_path / "sft.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert [line["response"] for line in lines[:2]] == ["It is 0.\n#### 0", "It is 2.\n#### 2"]
    assert lines[1]["prompt"].startswith("What is 1 plus 1?\n\nThink step by step.")
    assert lines[1]["prompt"].endswith("where answer is the number alone.")


def test_a_change_is_that_of_a_key_of_the_settings() -> None:
    given = gsm8k.arguments().parse_args(["runs", *(f"--{name}=x" for name in ("model", "train", "test"))])
    given.set = ["rollout.n=2", "data.train_batch_size=4"]
    changes = gsm8k.changed(given, gsm8k.SFT, gsm8k.RL)
    assert gsm8k.keys({"rollout.n": 8, "trainer.seed": 1}, changes) == ["rollout.n=2", "trainer.seed=1"]
    with pytest.raises(SystemExit, match=r"rollout\.n"):
        gsm8k.changed(given, gsm8k.SFT)


@pytest.mark.slow
def test_all_stages_of_a_small_model(tmp_path: Path) -> None:
    """The first call has no time for a stage; the next ones end all of them, and the last finds nothing to do."""
    model = init_model(tmp_path / "model", "qwen3", "nano", num_layers=1)
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    given = [str(tmp_path / "runs"), "--model", str(model), "--train", str(tmp_path / "train.jsonl")]
    given += ["--test", str(tmp_path / "test.jsonl"), "--seeds", "0"]
    small = {"trainer.total_epochs": 1, "data.train_batch_size": 4, "trainer.total_steps": 1, "trainer.val_freq": 0}
    small |= {"data.max_response_length": 8, "rollout.n": 2}
    given += [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    ends = []
    for more in (["--minutes", "0"], [], []):
        command = [sys.executable, "-m", "benchmarks.gsm8k", *given, *more]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
        assert not done.stderr, done.stderr[-2000:]
        ends.append((done.returncode, done.stdout))
    assert [status for status, _ in ends] == [1, 0, 0] and ends[1][1] == ends[2][1]
    found = [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]
    assert [each["stage"] for each in found] == ["before", "sft", "rl"]
    assert all(each["low"] <= each["accuracy"] <= each["high"] for each in found)
