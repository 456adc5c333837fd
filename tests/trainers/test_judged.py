# SPDX-License-Identifier: Apache-2.0
"""The policy as a judge of its own responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whet.config import TrainConfig, load_config
from whet.errors import ConfigError, RewardError
from whet.models.init import init_model
from whet.protocol import DataProto
from whet.rollout.collect import Collector
from whet.trainers.build import train
from whet.trainers.columns import ColumnPlan
from whet.types import Message, Prompt, Trajectory

JUDGED = {"reward.function": None, "reward_model.rubric": "yes_no"}
TRAINED = {"trainer.total_steps": 2, "trainer.log_rollouts": 1, "actor.optim.lr": 1e-2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that can read any text."""
    folder = tmp_path_factory.mktemp("judge") / "model"
    init_model(folder, "qwen3", "nano", num_layers=1)
    return str(folder)


def test_its_verdicts_are_the_reward(
    model: str,
    train_config: Callable[..., TrainConfig],
    additions: list[dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Prompt] = []
    sampled = Collector.collect

    def collect(self: Collector, prompts: Sequence[Prompt], *given: Any, **named: Any) -> list[list[Trajectory]]:
        """What the model would write, but for the words of its verdicts: yes where the response is of even length."""
        found = sampled(self, prompts, *given, **named)
        if named["purpose"] != "judge":
            return found
        asked.extend(prompts)
        verdicts = [len(response_in(prompt)) % 2 == 0 for prompt in prompts]
        words = [f"Hm.\nVerdict: {'yes' if verdict else 'no'}" for verdict in verdicts]
        return [
            [replace(each, messages=(Message("assistant", said),))] for [each], said in zip(found, words, strict=True)
        ]

    monkeypatch.setattr(Collector, "collect", collect)
    run = train(train_config({**JUDGED, **TRAINED, "model.path": model}), data=additions)
    files = sorted((tmp_path / "run" / "rollouts").glob("step_*.jsonl"))
    for record, file in zip(run.history, files, strict=True):
        responses = [response_in(prompt) for prompt in asked if prompt.uid.startswith(tuple(uids(file)))]
        assert record["reward/reward_model"] == pytest.approx(
            sum(len(each) % 2 == 0 for each in responses) / len(responses)
        )
        assert record["critic/rewards/mean"] == pytest.approx(record["reward/reward_model"])
    assert 0 < run.history[0]["reward/reward_model"] < 1


def uids(file: Path) -> list[str]:
    return [json.loads(line)["uid"] + ":" for line in file.read_text().splitlines()]


def response_in(prompt: Prompt) -> str:
    """The response that a judge is shown."""
    question = str(prompt.messages[-1].content)
    fence = question.partition("\n")[2].partition("\n")[0]
    return question.partition("to be judged:\n" + fence + "\n")[2].partition("\n" + fence)[0]


def test_a_verdict_that_cannot_be_read_fails_its_trajectory(
    model: str,
    train_config: Callable[..., TrainConfig],
    additions: list[dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampled, batches = Collector.collect, list[DataProto]()

    def collect(self: Collector, prompts: Sequence[Prompt], *given: Any, **named: Any) -> list[list[Trajectory]]:
        """Every second verdict, from the first on, has no score."""
        found = sampled(self, prompts, *given, **named)
        if named["purpose"] != "judge":
            return found
        words = ["Verdict: yes" if place % 2 else "Hm." for place in range(len(found))]
        return [
            [replace(each, messages=(Message("assistant", said),))] for [each], said in zip(found, words, strict=True)
        ]

    added = ColumnPlan.add

    def add(self: ColumnPlan, *given: Any, is_scored: bool = True) -> DataProto:
        batch = added(self, *given, is_scored=is_scored)
        batches.extend([batch] if is_scored else [])
        return batch

    monkeypatch.setattr(Collector, "collect", collect)
    monkeypatch.setattr(ColumnPlan, "add", add)
    changes = {**JUDGED, "model.path": model, "trainer.total_steps": 1, "reward_model.combine": "add"}
    run = train(train_config(changes), reward=lambda solution_str: 0.5, data=additions)
    [record], [batch] = run.history, batches
    count = len(batch)
    assert record["failures/reward"] == count / 2
    assert record["reward/reward_model"] == 1.0 and record["critic/rewards/mean"] == 1.5  # of those with a verdict
    assert batch["judge_scores"].tolist() == [0.0, 1.0] * (count // 2)
    assert batch["response_mask"].any(1).tolist() == [False, True] * (count // 2)
    assert batch["token_level_scores"].sum(1).tolist() == [0.0, 0.5] * (count // 2)
    assert [error and error.source for error in batch["error"]] == ["reward", None] * (count // 2)


def test_a_run_ends_where_no_verdict_can_be_read(
    model: str, train_config: Callable[..., TrainConfig], additions: list[dict[str, str]]
) -> None:
    changes = {**JUDGED, "model.path": model, "trainer.total_steps": 1}
    with pytest.raises(
        RewardError, match=r"all \d+ trajectories failed.*has no score where the rubric yes_no wants one"
    ):
        train(train_config(changes), data=additions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_model.model_path": "rm"}, "reward_model.model_path and reward_model.rubric are both set"),
        ({"algorithm.adv_estimator": "remax"}, "and reward_model.rubric is set; expected an estimator without"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, None, {**JUDGED, "model.path": "m", **changes}, given={"data"})
