# SPDX-License-Identifier: Apache-2.0
"""A judge as the reward: the policy itself, or another model with a role of its own."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.raising import raises
from whet.batch import Batch
from whet.checkpoints.export import export
from whet.config import SFTConfig, TrainConfig, load_config
from whet.errors import ConfigError, RewardError
from whet.models.load import load_policy, load_tokenizer
from whet.plugins.lessons.init_model import init_model
from whet.plugins.scores.judge.role import UNREADABLE
from whet.plugins.scores.judge.rubrics import load_rubric
from whet.rollout.rollouts import Rollouts
from whet.trainers.build import train
from whet.trainers.columns import ColumnPlan
from whet.trainers.sft import train_sft
from whet.types import Failure, Group, Message, Prompt

JUDGED = {"reward.function": None, "reward_model.rubric": "yes_no"}
TRAINED = {"trainer.total_steps": 2, "trainer.log_rollouts": 1, "actor.optim.lr": 1e-2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that can read any text."""
    folder = tmp_path_factory.mktemp("judge") / "model"
    init_model(folder, "qwen3", "nano", num_layers=1)
    return str(folder)


def saying(found: list[Group], words: list[str]) -> list[Group]:
    """The groups, of one trajectory each, with other words."""
    return [of_one(group, messages=(Message("assistant", said),)) for group, said in zip(found, words, strict=True)]


def of_one(group: Group, **changes: Any) -> Group:
    [trajectory] = group.trajectories
    return replace(group, trajectories=(replace(trajectory, **changes),))


def test_its_verdicts_are_the_reward(
    model: str,
    train_config: Callable[..., TrainConfig],
    additions: list[dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Prompt] = []
    sampled = Rollouts.sample

    def sample(self: Rollouts, prompts: Sequence[Prompt], *given: Any, **named: Any) -> list[Group]:
        """Samples like the model, except for verdicts: yes for a response of even length."""
        found = sampled(self, prompts, *given, **named)
        if named["purpose"] != "judge":
            return found
        asked.extend(prompts)
        verdicts = [len(response_in(prompt)) % 2 == 0 for prompt in prompts]
        return saying(found, [f"Hm.\nVerdict: {'yes' if verdict else 'no'}" for verdict in verdicts])

    monkeypatch.setattr(Rollouts, "sample", sample)
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
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampled, batches = Rollouts.sample, list[Batch]()
    lost = Failure("engine", "no rank is left", timed_out=True)

    def sample(self: Rollouts, prompts: Sequence[Prompt], *given: Any, **named: Any) -> list[Group]:
        """Every second verdict, from the first on, has no score; the third is lost in the engine."""
        found = sampled(self, prompts, *given, **named)
        if named["purpose"] != "judge":
            return found
        verdicts = saying(found, ["Verdict: yes" if place % 2 else "Hm." for place in range(len(found))])
        verdicts[2] = of_one(found[2], messages=(), failure=lost)
        return verdicts

    added = ColumnPlan.add

    def add(self: ColumnPlan, *given: Any, is_scored: bool = True) -> Batch:
        batch = added(self, *given, is_scored=is_scored)
        batches.extend([batch] if is_scored else [])
        return batch

    monkeypatch.setattr(Rollouts, "sample", sample)
    monkeypatch.setattr(ColumnPlan, "add", add)
    changes = {**JUDGED, **TRAINED, "model.path": model, "trainer.total_steps": 1, "reward_model.combine": "add"}
    run = train(train_config(changes), reward=lambda solution_str: 0.5, data=additions)
    [record], [batch] = run.history, batches
    count = len(batch)
    assert record["failures/reward"] == count / 2
    assert record["reward/reward_model"] == 1.0 and record["critic/rewards/mean"] == 1.5  # of those with a verdict
    assert batch["judge_scores"].tolist() == [0.0, 1.0] * (count // 2)
    assert batch["response_mask"].any(1).tolist() == [False, True] * (count // 2)
    assert batch["token_level_scores"].sum(1).tolist() == [0.0, 0.5] * (count // 2)
    assert [error and error.source for error in batch["error"]] == ["reward", None] * (count // 2)
    assert record["critic/score/mean"] == 0.5 and record["reward/groups_all_equal"] == 1.0
    lines = rollouts(tmp_path / "run", "step_000001")
    unread = UNREADABLE.format(rubric="yes_no", said="Hm.")
    messages = [line["failure"] and line["failure"]["message"] for line in lines]
    assert re.search("engine: no rank", messages.pop(2))
    assert messages == [None if place % 2 else unread for place in range(count) if place != 2]
    assert [bool(line["failure"] and line["failure"]["timed_out"]) for line in lines] == [i == 2 for i in range(count)]
    assert [line["reward"] for line in lines] == [None, 0.5] * (count // 2)
    assert [line["parts"] for line in lines] == [{}, {"reward_model": 1.0}] * (count // 2)


def test_another_model_gives_the_verdicts(
    model: str,
    train_config: Callable[..., TrainConfig],
    additions: list[dict[str, str]],
    tmp_path: Path,
) -> None:
    """Two judges that always say the same, one of them in the place of the reward and one beside it."""
    for digit, combine, expected in ((7, "replace", 0.7), (2, "add", 1.0 + 3 * 0.2)):
        changes = {**TRAINED, "model.path": model, "trainer.total_steps": 1, "reward_model.combine": combine}
        changes |= {"reward_model.rubric": "scale", "reward_model.model_path": judge_that_says(tmp_path, digit)}
        changes |= {"reward_model.weight": 3.0 if combine == "add" else 1.0, "trainer.run_dir": tmp_path / combine}
        run = train(train_config(changes), reward=lambda solution_str: 1.0, data=additions)
        [record] = run.history
        assert record["reward/reward_model"] == pytest.approx(digit / 10)
        assert record["critic/rewards/mean"] == pytest.approx(expected)
        assert sorted(run.roles) == ["actor", "reward_model", "rollout"]


def judge_that_says(folder: Path, digit: int) -> str:
    """A model of no layer's effect, in which each token has one that follows: `Score: 7` behind any prompt."""
    path = folder / f"judge_{digit}"
    init_model(path, "qwen3", "nano", num_layers=1)
    loaded, tokenizer = load_policy(path), load_tokenizer(path)
    said = [*tokenizer.encode(f"\nScore: {digit}", add_special_tokens=False), tokenizer.eos_token_id]
    with torch.no_grad():
        for weight in (*loaded.model.layers.parameters(), loaded.model.embed_tokens.weight):
            weight.zero_()
        head = torch.zeros_like(loaded.lm_head.weight)
        for place, (token, following) in enumerate(pairwise(said)):
            loaded.model.embed_tokens.weight[token, place] = head[following, place] = 1.0
    loaded.config.tie_word_embeddings = False
    loaded.lm_head.weight = torch.nn.Parameter(head)
    loaded.save_pretrained(path)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("is_apart", [False, True])
def test_a_judge_whose_verdicts_can_be_read_of_one_prompt_alone(is_apart: bool, tmp_path: Path) -> None:
    """A small model is taught to judge answers to a's and to mumble about answers to b's, then it, or another one, is
    trained by its verdicts. Held-out answers keep their truth."""
    rubric = {
        "template": "Verdict: yes or no, of {{ response }} to {{ prompt }}",
        "parser": "yes_no",
        "system": "Judge.",
    }
    (tmp_path / "short.json").write_text(json.dumps(rubric))
    asks, draws, taught = load_rubric(str(tmp_path / "short.json")), random.Random(0), []
    for _ in range(200):
        letter, answer = draws.choice("ab"), "".join(draws.choices("abcxyz", k=draws.randrange(1, 9)))
        question = asks.messages({"prompt": letter * 8, "response": answer, "ground_truth": ""})
        taught.append({"prompt": question, "response": "Verdict: yes" if letter == "a" else "Hm."})
    init_model(tmp_path / "model", "qwen3", "nano", num_layers=2)
    pools = {"train": {"roles": ["actor", "rollout"]}, "judge": {"roles": ["reward_model"], "processes": 2}}
    teaching = {
        "model.path": str(tmp_path / "model"),
        "data.max_length": 1024,
        "data.train_batch_size": 4,
        "optim.lr": 3e-3,
        "trainer.total_steps": 60,
        "trainer.run_dir": str(tmp_path / "sft"),
        "trainer.logger": ["jsonl"],
    }
    train_sft(load_config(SFTConfig, None, teaching, given={"data"}).config, data=taught)
    judge = str(export(tmp_path / "sft", tmp_path / "judge"))
    other = {"model.path": teaching["model.path"], "reward_model.model_path": judge, "cluster.placement": pools}
    changes = {
        **JUDGED,
        **(other if is_apart else {"model.path": judge}),
        "reward_model.rubric": str(tmp_path / "short.json"),
        "data.train_batch_size": 2,
        "data.max_prompt_length": 64,
        "data.max_response_length": 16,
        "rollout.n": 4,
        "trainer.total_steps": 2,
        "trainer.log_rollouts": 1,
        "trainer.val_freq": 1,
        "trainer.run_dir": str(tmp_path / "run"),
        "trainer.logger": ["jsonl"],
    }
    rows = [{"prompt": letter * 8} for letter in "ab"]
    config = load_config(TrainConfig, None, changes, given={"data", "val_data"}).config
    run = train(config, data=rows, val_data=rows)
    unread = UNREADABLE.format(rubric="short", said="Hm.")
    for step in (1, 2):
        lines = rollouts(tmp_path / "run", f"step_{step:06}")
        told = [(line["failure"] and line["failure"]["message"], line["parts"]) for line in lines]
        of_letter = {
            letter: [each for each, line in zip(told, lines, strict=True) if letter * 8 in line["prompt"]]
            for letter in "ab"
        }
        assert of_letter == {"a": [(None, {"reward_model": 1.0})] * 4, "b": [(unread, {})] * 4}
        record = run.history[step]
        assert record["failures/reward"] == 4 and record["reward/reward_model"] == 1.0
        first, second = rollouts(tmp_path / "run", f"validation_{step:06}")
        assert (first["parts"], first["failure"]) == ({"reward_model": 1.0}, None)
        assert (second["parts"], second["failure"], second["logged"]) == ({}, None, {"reward_model": unread})
        assert record["val/reward_model"] == 1.0 and record["val/failures"] == 0


def rollouts(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "rollouts" / f"{name}.jsonl").read_text().splitlines()]


def test_a_run_ends_where_no_verdict_can_be_read_and_its_rollouts_say_why(
    model: str, train_config: Callable[..., TrainConfig], additions: list[dict[str, str]], tmp_path: Path
) -> None:
    changes = {**JUDGED, **TRAINED, "model.path": model}
    with raises(RewardError, key="all 16 trajectories", found=re.compile("yes_no")):
        train(train_config(changes), data=additions)
    lines = rollouts(tmp_path / "run", "step_000001")
    assert len(lines) == 16
    assert all("yes_no" in line["failure"]["message"] for line in lines)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm.adv_estimator": "remax"}, "algorithm.adv_estimator: remax; .*reward_model.rubric"),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(TrainConfig, None, {**JUDGED, "model.path": "m", **changes}, given={"data"})
