# SPDX-License-Identifier: Apache-2.0
"""DPO on a model's own answers to GSM8K, by one command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gsm8k_preference import pair_of
from whet.plugins.lessons.init_model import init_model

ROOT = Path(__file__).parents[2]


def answer(text: str, accuracy: float, finish_reason: str = "stop", index: int = 0) -> dict[str, Any]:
    told = {"response": text, "accuracy": accuracy, "reward": accuracy, "finish_reason": finish_reason, "failure": None}
    return {"index": index, "data_source": "gsm8k", "prompt": "", "ground_truth": "4", "parts": {}, **told}


def test_a_pair_has_the_first_right_and_the_first_wrong_answer_that_ended() -> None:
    answers = [answer("3 and", 0.0, "length"), answer("5<end>", 0.0), answer("6<end>", 0.0), answer("4<end>", 1.0)]
    assert pair_of(answers, ["<end>"]) == {"chosen": "4", "rejected": "5"}
    assert pair_of(answers[:3], ["<end>"]) is None
    assert pair_of([*answers[:1], answers[3]], ["<end>"]) is None


@pytest.mark.slow
def test_all_stages_of_a_small_model(tmp_path: Path) -> None:
    """The samples are there already; the second call finds nothing to do."""
    model = init_model(tmp_path / "model", "qwen3", "nano", num_layers=1)
    rows = [{"question": f"What is {a} plus {a}?", "answer": f"#### {2 * a}"} for a in range(6)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = tmp_path / "runs" / "samples" / "0" / "eval"
    samples.mkdir(parents=True)
    both = (("It is 4.", 1.0), ("It is 5.", 0.0))
    answers = [answer(text, accuracy, index=a) for a in range(6) for text, accuracy in both]
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
    assert len(pairs) == 4 and {pair["chosen"] for pair in pairs} == {"It is 4."}
    found = [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").read_text().splitlines()]
    assert [each["stage"] for each in found] == ["before", "dpo"]
