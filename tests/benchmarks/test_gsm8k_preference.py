# SPDX-License-Identifier: Apache-2.0
"""DPO on solutions of GSM8K against a model's own answers, by one command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gsm8k_preference import wrong_answer
from whet.plugins.lessons.init_model import init_model

ROOT = Path(__file__).parents[2]


def answer(text: str, accuracy: float, finish_reason: str = "stop", index: int = 0) -> dict[str, Any]:
    told = {"response": text, "accuracy": accuracy, "reward": accuracy, "finish_reason": finish_reason, "failure": None}
    return {"index": index, "data_source": "gsm8k", "prompt": "", "ground_truth": "4", "parts": {}, **told}


def test_a_wrong_answer_ended_by_itself_and_has_no_end_token() -> None:
    assert wrong_answer(answer("5<end>", 0.0), ["<end>"]) == "5"
    assert wrong_answer(answer("3 and", 0.0, "length"), ["<end>"]) == ""
    assert wrong_answer(answer("4<end>", 1.0), ["<end>"]) == ""
    assert wrong_answer({**answer("5<end>", 0.0), "failure": "its reward failed"}, ["<end>"]) == ""


@pytest.mark.slow
def test_all_stages_of_a_small_model(tmp_path: Path) -> None:
    """The samples are there already; the second call finds nothing to do."""
    model = init_model(tmp_path / "model", "qwen3", "nano", num_layers=1)
    rows = [
        {"question": f"What is {a} plus {a}?", "answer": f"{a} and {a} is <<{a}+{a}={2 * a}>>{2 * a}.\n#### {2 * a}"}
        for a in range(7)
    ]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = tmp_path / "runs" / "samples" / "0" / "eval"
    samples.mkdir(parents=True)
    answers = [answer("It is 12.", float(a == 6), index=a) for a in range(7)]
    (samples / "answers.jsonl").write_text("".join(json.dumps(each) + "\n" for each in answers))
    (samples / "summary.json").write_text("{}")
    given = [str(tmp_path / "runs"), "--model", str(model), "--train", str(tmp_path / "train.jsonl"), "--seeds", "0"]
    given += ["--test", str(tmp_path / "test.jsonl"), "--pairs", "4", "--held-out", "2"]
    small: dict[str, object] = {"data.train_batch_size": 2, "data.max_response_length": 8}
    small |= {"model.dtype": "float32", "rollout.dtype": "float32"}
    given += [word for name, value in small.items() for word in ("--set", f"{name}={value}")]
    said = []
    for _ in range(2):
        command = [sys.executable, "-m", "benchmarks.gsm8k_preference", *given]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
        assert not done.stderr, done.stderr[-2000:]
        assert done.returncode == 0
        said.append(done.stdout)
    assert said[0] == said[1] and said[0].endswith("all is done\n")
    pairs = [json.loads(line) for line in (tmp_path / "runs" / "seed_0" / "pairs.jsonl").read_text().splitlines()]
    assert len(pairs) == 4 and {pair["rejected"] for pair in pairs} == {"It is 12."}
    assert all(pair["chosen"] in {f"{a} and {a} is {2 * a}.\n#### {2 * a}" for a in range(6)} for pair in pairs)
    found = [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]
    assert [each["stage"] for each in found] == ["before", "dpo"]
