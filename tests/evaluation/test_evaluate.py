# SPDX-License-Identifier: Apache-2.0
"""How good a model is: numbers by hand, greedy answers by plain transformers, and the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from whet.config import EvalConfig, load_config
from whet.errors import ConfigError, RewardError
from whet.evaluation.evaluate import evaluate, summarise
from whet.types import Failure, Group, Message, Prompt, Trajectory, Turn

MakeConfig = Callable[..., EvalConfig]
Rows = list[dict[str, str]]


@pytest.fixture
def eval_config(model_folder: Path) -> MakeConfig:
    def make(**overrides: Any) -> EvalConfig:
        small: dict[str, Any] = {
            "model.path": str(model_folder),
            "data.apply_chat_template": False,
            "data.max_prompt_length": 16,
            "data.max_response_length": 6,
            "reward.num_workers": 0,
        }
        return load_config(EvalConfig, None, small | overrides, given={"reward", "data"}).config

    return make


def answer(
    index: int, sample: int, source: str, reward: float | None, accuracy: float | None, tokens: int
) -> Trajectory:
    prompt = Prompt(f"0:{index}", index, (Message("user", "?"),), (1,), source, None)
    turn = Turn((1,), tuple(range(tokens)), (0.0,) * tokens, "stop", 0, reward=0.25 if reward == 3.0 else 0.0)
    failure = Failure("reward", "late") if reward is None else None
    return Trajectory(f"0:{index}:{sample}", prompt, (turn,), sample, reward, accuracy, failure=failure)


def test_a_summary_by_hand() -> None:
    answers = [
        [answer(0, 0, "a", 1.0, 1.0, 2), answer(0, 1, "a", 0.0, 0.0, 4)],
        [answer(1, 0, "b", 0.5, 0.0, 3), answer(1, 1, "b", None, None, 3)],  # the second failed: it is wrong
        [answer(2, 0, "b", 1.0, 1.0, 5), answer(2, 1, "b", 3.0, 1.0, 1)],  # its environment paid 0.25 on top
    ]
    found = summarise([Group(group[0].prompt, tuple(group)) for group in answers])
    assert found.summary() == {
        "num_prompts": 3,
        "n": 2,
        "accuracy": (0.5 + 0.0 + 1.0) / 3,
        "best_accuracy": 2 / 3,
        "reward": (1.0 + 0.0 + 0.5 + 0.0 + 1.0 + 3.25) / 6,
        "mean_response_tokens": 18 / 6,
        "failures": 1,
        "by_data_source": {"a": 0.5, "b": 0.5},
    }
    assert len(found.groups) == 3


def test_greedy_answers_are_those_of_plain_transformers(
    eval_config: MakeConfig, additions: Rows, model_folder: Path, tmp_path: Path
) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    expected = []
    for row in additions[:5]:
        ids = torch.tensor([tokenizer.encode(row["prompt"])])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        expected.append(tokenizer.decode(out[0, ids.shape[1] :]))
    config = eval_config(**{"output": str(tmp_path / "out"), "data.val_max_prompts": 5})
    found = evaluate(config, reward=lambda solution_str, ground_truth: solution_str == ground_truth, data=additions)
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert [line["response"] for line in lines] == expected
    assert [line["prompt"] for line in lines] == [row["prompt"] for row in additions[:5]]
    assert [line["ground_truth"] for line in lines] == [row["answer"] for row in additions[:5]]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary == found.summary() and summary["num_prompts"] == 5 and summary["n"] == 1


def test_samples_count_each_and_best_of_them(eval_config: MakeConfig, additions: Rows) -> None:
    config = eval_config(**{"rollout.n": 4, "rollout.temperature": 1.0})
    found = evaluate(config, reward=lambda solution_str: {"score": 1, "acc": len(solution_str) > 4}, data=additions)
    right = [[float(a.accuracy or 0) for a in group.trajectories] for group in found.groups]
    assert len(right) == 20 and all(len(each) == 4 for each in right)
    assert found.accuracy == pytest.approx(sum(map(sum, right)) / 80) and 0 < found.accuracy < 1
    assert found.best_accuracy == pytest.approx(sum(any(each) for each in right) / 20)
    assert found.best_accuracy > found.accuracy
    again = evaluate(config, reward=lambda solution_str: {"score": 1, "acc": len(solution_str) > 4}, data=additions)
    assert again.summary() == found.summary()
    other = eval_config(**{"rollout.n": 4, "rollout.temperature": 1.0, "seed": 1})
    sampled = evaluate(other, reward=lambda solution_str: 0.0, data=additions).groups
    assert [g.trajectories[0].turns for g in sampled] != [g.trajectories[0].turns for g in found.groups]


def test_without_output_nothing_is_written(
    eval_config: MakeConfig, additions: Rows, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(model_folder.parent.rglob("*"))
    evaluate(eval_config(), reward=lambda solution_str: 0.0, data=additions[:2])
    assert list(tmp_path.iterdir()) == [] and set(model_folder.parent.rglob("*")) == before


def test_a_judge_that_fails_is_counted(eval_config: MakeConfig, additions: Rows) -> None:
    judged = iter([1.0])
    found = evaluate(eval_config(), reward=lambda solution_str: next(judged), data=additions[:4])
    assert (found.failures, found.accuracy, found.reward) == (3, 0.25, 0.25)


def test_a_judge_that_always_fails_is_an_error_after_all_is_written(
    eval_config: MakeConfig, additions: Rows, tmp_path: Path
) -> None:
    config = eval_config(output=str(tmp_path / "out"))
    with pytest.raises(RewardError, match=r"all 3 answers failed.*'str' object has no attribute 'nothing'"):
        evaluate(config, reward=lambda solution_str: solution_str.nothing, data=additions[:3])
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["failures"] == 3


def test_lengths_over_the_models_are_refused(eval_config: MakeConfig, additions: Rows) -> None:
    with pytest.raises(ConfigError, match="the model has 512 positions"):
        evaluate(eval_config(**{"data.max_response_length": 500}), reward=lambda solution_str: 0.0, data=additions)
