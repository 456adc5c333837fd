# SPDX-License-Identifier: Apache-2.0
"""Teachers and hints in a real run: which prompt they see, which tokens they judge."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.raising import raises
from whet.batch import Batch
from whet.config import TrainConfig
from whet.config.schema import TeacherConfig
from whet.data.prompts import PromptFormat
from whet.errors import ConfigError
from whet.metrics import Metrics
from whet.rollout.batch import to_batch
from whet.trainers.build import build, build_scorer, train
from whet.trainers.run import Run
from whet.trainers.teacher import chat_of, hints_of, own_prompt, with_hints
from whet.types import Group

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]
CPO = {
    "algorithm.adv_estimator": "cpo",
    "teacher.hint": "reference",
    "teacher.hint_template": "{{ content }}{{ hint }}",
}


def length(solution_str: str) -> float:
    return float(len(solution_str) % 2)


def teaching(run: Run) -> tuple[TeacherConfig, PromptFormat]:
    """The settings of the run's teacher, and the chat template."""
    return run.config.teacher, chat_of(run.tokenizer, run.config.data, run.config.environment)


def built(config: TrainConfig, rows: Rows) -> tuple[Run, list[Group], Batch]:
    run = build(config, build_scorer(config.reward, length), rows)
    groups = run.rollouts.start(4, step=1).result().groups
    return run, groups, to_batch(groups, pad_token_id=run.pad_token_id)


def test_a_hint_is_in_the_prompt_and_answers_keep_their_tokens(train_config: MakeConfig, additions: Rows) -> None:
    run, groups, batch = built(train_config({**CPO, "teacher.hint_template": "{{ content }}{{ hint }}+"}), additions)
    hinted = with_hints(batch, run.sources(groups, 1), *teaching(run))
    assert torch.equal(hinted["responses"], batch["responses"])
    assert torch.equal(hinted["response_mask"], batch["response_mask"])
    for row, owner in enumerate(batch["trajectory_uid"].tolist()):
        prompt = [t for group in groups for t in group.trajectories][owner].prompt
        ids = own_prompt((hinted["prompts"][row], hinted["attention_mask"][row]))
        text = run.tokenizer.decode(ids)
        assert text == f"{prompt.messages[-1].content}{prompt.ground_truth}+"
    column = run.columns.add(batch, run.sources(groups, 1), Metrics())["teacher_log_probs"]
    expected = run.roles["actor"].forward(hinted, ("log_probs",), 1.0)["log_probs"]
    torch.testing.assert_close(column, expected)
    run.close()


def test_a_hint_that_says_nothing_changes_nothing(train_config: MakeConfig, additions: Rows) -> None:
    """k = 0."""
    run, groups, batch = built(train_config({**CPO, "teacher.hint_template": "{{ content }}"}), additions)
    batch = run.columns.add(batch, run.sources(groups, 1), Metrics())
    torch.testing.assert_close(batch["teacher_log_probs"], batch["old_log_probs"])
    run.close()


def test_a_peer_is_a_right_answer_of_another(train_config: MakeConfig, additions: Rows) -> None:
    run, groups, _ = built(train_config({**CPO, "teacher.hint": "peer"}), additions)
    [first, *_] = groups
    answers = tuple(
        replace(answer, accuracy=float(place in right))
        for right in [(1, 2)]
        for place, answer in enumerate(first.trajectories)
    )
    texts = [str(answer.messages[-1].content) for answer in answers]
    [hints] = hints_of(run.sources([replace(first, trajectories=answers)], 1), *teaching(run))
    assert hints == [texts[1], texts[2], texts[1], texts[1]]
    nobody = tuple(replace(answer, accuracy=0.0) for answer in answers)
    assert hints_of(run.sources([replace(first, trajectories=nobody)], 1), *teaching(run)) == [[None] * 4]
    run.close()


def test_the_policy_may_hint_itself(train_config: MakeConfig, additions: Rows) -> None:
    options = {"question": "{{ content }}", "max_tokens": 3}
    run, groups, _ = built(train_config({**CPO, "teacher.hint": "own", "teacher.hint_options": options}), additions)
    hints = hints_of(run.sources(groups, 1), *teaching(run))
    assert [len(group) for group in hints] == [4] * 4
    assert all(len(set(group)) == 1 and isinstance(group[0], str) for group in hints)
    run.close()


def test_teachers_by_data_source(train_config: MakeConfig, additions: Rows, model_folder: Path) -> None:
    overrides: dict[str, Any] = {
        "algorithm.adv_estimator": "on_policy_distillation",
        "algorithm.policy_loss": "reinforce",
        "teacher.model_paths": {"*": str(model_folder)},
        "trainer.total_steps": 1,
    }
    run, groups, batch = built(train_config(overrides), additions)
    assert "teacher:*" in run.roles
    added = run.columns.add(batch, run.sources(groups, 1), Metrics())
    torch.testing.assert_close(added["teacher_log_probs"], added["old_log_probs"])  # the same model still
    run.close()
    overrides["teacher.model_paths"] = {"elsewhere": str(model_folder)}
    with raises(ConfigError, key="teacher.model_paths", expected=re.compile(": elsewhere$")):
        train(train_config(overrides), reward=length, data=additions)


@pytest.mark.parametrize("wrap_method", ["naive", "tok_kl"])
def test_cpo_trains(wrap_method: str, train_config: MakeConfig, additions: Rows) -> None:
    config = train_config({**CPO, "algorithm.adv_options": {"wrap_method": wrap_method, "cpo_lambda": 1.1}})
    history = train(config, reward=length, data=additions).history
    assert all("cpo/k" in step and step["actor/grad_norm"] > 0 for step in history)


def test_every_token_can_be_looked_at(
    train_config: MakeConfig, additions: Rows, tmp_path: Path, model_folder: Path
) -> None:
    """trainer.log_tokens writes the hint's effect on a token, and the wrapper's term."""
    config = train_config({**CPO, "algorithm.adv_options.wrap_method": "tok_kl", "trainer.log_tokens": 1})
    run = train(config, reward=length, data=additions)
    rows = [json.loads(line) for line in (tmp_path / "run" / "tokens" / "step_000001.jsonl").open()]
    assert len(rows) == 16
    for row in rows:
        size = len(row["tokens"])
        assert {len(row[name]) for name in ("k", "advantages", "entropy", "response_mask")} == {size}
        for k, hinted, alone in zip(row["k"], row["teacher_log_probs"], row["old_log_probs"], strict=True):
            assert k == pytest.approx(hinted - alone, abs=2e-6)
    answers = {a["uid"]: a["response"] for a in map(json.loads, (tmp_path / "run/rollouts/step_000001.jsonl").open())}
    assert all("".join(row["tokens"]) == answers[row["uid"]] for row in rows)
    assert run.step == 2
