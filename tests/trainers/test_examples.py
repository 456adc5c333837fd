# SPDX-License-Identifier: Apache-2.0
"""The files of examples/extending: the values of their functions, and each in a run."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from whet import registry
from whet.algorithms.calls import call
from whet.checkpoints.export import export
from whet.config import TrainConfig
from whet.environments.calls import Call
from whet.environments.protocol import Answer
from whet.models.load import load_policy
from whet.plugins.agents.tools.parsers import parse
from whet.plugins.agents.tools.sources import schema_of
from whet.registry import load_target
from whet.trainers.build import train
from whet.types import Prompt

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "extending"
ELSEWHERE = {"data_set", "sampler"}  # tests/trainers/test_data_examples.py
KL = {"algorithm.kl.form": f"{FOLDER}/kl.py:soft_abs", "algorithm.kl.coef": 0.1, "algorithm.kl.where": "loss"}
HINT = {"algorithm.adv_estimator": "cpo", "teacher.hint_template": "{{ content }}{{ hint }}"}
RUNS: dict[str, dict[str, Any]] = {
    "estimator": {
        "algorithm.adv_estimator": f"{FOLDER}/estimator.py:over_median",
        "algorithm.adv_options": {"scale": 2},
    },
    "policy_loss": {"algorithm.policy_loss": f"{FOLDER}/policy_loss.py:bounded", "actor.mini_batch_size": 2},
    "wrapper": {
        **HINT,
        "algorithm.adv_options": {"wrap_method": f"{FOLDER}/wrapper.py:surprised"},
        "teacher.hint": "reference",
    },
    "provider": {"algorithm.adv_estimator": f"{FOLDER}/provider.py:cautious"},
    "value_loss": {"algorithm.adv_estimator": "gae", "critic.value_loss": f"{FOLDER}/value_loss.py:huber"},
    "aggregation": {"algorithm.loss_agg_mode": f"{FOLDER}/aggregation.py:root_length"},
    "kl": KL,
    "token_weight": {"algorithm.correction.weight": f"{FOLDER}/token_weight.py:late"},
    "rejection": {"algorithm.correction.rejection": f"{FOLDER}/rejection.py:likely"},
    "filter": {
        "algorithm.filter.name": f"{FOLDER}/filter.py:hard",
        "algorithm.filter.options": {"most": 0.9},
    },
    "hint": {**HINT, "teacher.hint": f"{FOLDER}/hint.py:first_digits", "teacher.hint_options": {"count": 2}},
    "environment": {"environment.name": f"{FOLDER}/environment.py:Doubling", "environment.max_turns": 2},
    "tool": {
        "environment.tools": [f"{FOLDER}/tool.py:days_between"],
        "environment.tool_parser": f"{FOLDER}/tool_parser.py:lines",
    },
    "training_engine": {
        "actor.engine.name": f"{FOLDER}/training_engine.py:Pulled",
        "actor.engine.options": {"pull": 0.5},
    },
    "loop": {"trainer.loop": f"{FOLDER}/loop.py:fit"},
}


def odd(solution_str: str) -> float:
    return float(len(solution_str) % 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_examples_train(name: str, train_config: Callable[..., TrainConfig], additions: list[dict[str, str]]) -> None:
    history = train(train_config(RUNS[name]), reward=odd, data=additions).history
    assert all(step["actor/grad_norm"] > 0 for step in history)


def test_files_and_callbacks_in_a_run(
    train_config: Callable[..., TrainConfig], additions: list[dict[str, str]], tmp_path: Path
) -> None:
    config = train_config(
        {
            "rollout.engine.name": f"{FOLDER}/rollout_engine.py:Recorded",
            "rollout.engine.options": {"file": str(tmp_path / "requests.jsonl")},
            "trainer.callbacks": [f"{FOLDER}/callback.py:{name}" for name in ("stop_when_solved", "to_csv")],
        }
    )
    run = train(config, reward=lambda solution_str: 1.0, data=additions)
    [record] = run.history  # of two steps: the first has every response right
    lines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(lines) == 4 * 4
    assert all(len(line["token_ids"]) == len(line["log_probs"]) for line in lines)
    [curve] = csv.reader((run.run_dir / "curves.csv").open())
    assert [float(value) for value in curve] == [1, 1.0, record["response_length/mean"]]


MASK = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
X = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 9.0, 9.0, 9.0]])


def test_tensor_functions_by_hand() -> None:
    def of(kind: registry.Registry, name: str, counts: dict[str, Any] | None = None, **columns: torch.Tensor) -> Any:
        return call(kind[f"{FOLDER}/{name}"], {"response_mask": MASK, **columns}, {}, counts)

    # medians are the lower middle: scores 3 of [1, 3] and 1: 1 - 1, 3 - 1
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
    uid = torch.tensor([7, 7])
    over = of(registry.ADV_ESTIMATORS, "estimator.py:over_median", token_level_rewards=rewards, uid=uid)
    assert over.tolist() == [0.0, 2.0]
    # errors of 1/2 and 3: 1/8 and 3 - 1/2
    columns = {"values": torch.tensor([[0.5, 3.0]]), "returns": torch.tensor([[0.0, 0.0]])}
    mask = torch.ones(1, 2)
    losses, measured = of(registry.VALUE_LOSSES, "value_loss.py:huber", response_mask=mask, **columns)
    assert losses.tolist() == [[0.125, 2.5]] and measured["far"].tolist() == [[0.0, 1.0]]
    # (1 + 2 + 3 + 4) / sqrt(4) + 5 / sqrt(1), over two sequences
    counted = {"num_sequences": torch.tensor(2)}
    assert of(registry.AGGREGATIONS, "aggregation.py:root_length", counts=counted, values=X) == 5.0
    # d = sqrt(3): sqrt(1 + 3) - 1
    kl = of(registry.KL_FORMS, "kl.py:soft_abs", log_probs=MASK * 3**0.5, ref_log_probs=MASK * 0)
    torch.testing.assert_close(kl, MASK)
    late = of(registry.WEIGHTS, "token_weight.py:late")
    torch.testing.assert_close(late[0], torch.tensor([0.729, 0.81, 0.9, 1.0]))
    assert late[1, 0] == 1
    sampled = torch.tensor([[math.log(1e-3), math.log(1e-5), -0.1, -20.0], [-1.0, 0, 0, 0]])
    kept = of(registry.REJECTIONS, "rejection.py:likely", rollout_log_probs=sampled)
    assert kept[0].tolist() == [True, False, True, False]
    # log-ratio 0.2 at the bound 0.2: -2 x 0.2 tanh(1)
    moved = {"log_probs": torch.tensor([[-0.8]]), "old_log_probs": torch.tensor([[-1.0]])}
    own = {"response_mask": torch.ones(1, 1), "advantages": torch.tensor([[2.0]])}
    loss, _ = of(registry.POLICY_LOSSES, "policy_loss.py:bounded", **own, **moved)
    assert loss.item() == pytest.approx(-0.4 * math.tanh(1))


def test_functions_of_values_texts_and_groups_by_hand() -> None:
    hard = registry.FILTERS[f"{FOLDER}/filter.py:hard"].load()
    assert [hard(values) for values in ([0, 0], [0, 1], [1, 1], [0, 1, 1])] == [False, True, False, False]
    near = registry.REWARDS[f"{FOLDER}/reward.py:near"].load()
    assert near("7", "10")["reward"] == pytest.approx(0.7) and near("30", "10")["reward"] == 0
    assert near("10", "10") == {"reward": 1.0, "accuracy": 1.0, "is_number": 1.0}
    assert near("ten", "10")["is_number"] == 0
    group = SimpleNamespace(
        prompt=SimpleNamespace(ground_truth="42"), trajectories=[SimpleNamespace(accuracy=a) for a in (1.0, 0.0, None)]
    )
    assert load_target(f"{FOLDER}/hint.py:first_digits")([group]) == [[None, "4", "4"]]


def test_an_environment_a_tool_and_a_parser_by_hand() -> None:
    game = registry.ENVIRONMENTS[f"{FOLDER}/environment.py:Doubling"].load()()
    number = int(game.reset(Prompt("", 0, (), (), "sums", None), 3).messages[0].content.removesuffix("*2="))
    first = game.step(Answer(str(2 * number)))
    assert (first.reward, first.done, first.messages[0].content) == (0.5, False, f"{2 * number}*2=")
    last = game.step(Answer("wrong"))
    assert (last.reward, last.done) == (0.0, True)
    days = registry.TOOLS[f"{FOLDER}/tool.py:days_between"].load()
    assert days("2024-02-28", "2024-03-01") == 2 and days("2024-02-28", "2024-03-01", inclusive=True) == 3
    schema, _ = schema_of(days, "days_between", "environment.tools")
    assert schema.parameters["properties"]["last"] == {"type": "string", "description": "the later date"}
    assert schema.parameters["required"] == ["first", "last"]
    found = parse(f"{FOLDER}/tool_parser.py:lines", 'I look.\n!add {"a": 1}\n!stop\n!add [1\n', {})
    assert found.content == "I look."
    assert [(each.name, each.arguments) for each in found.calls[:2]] == [("add", {"a": 1}), ("stop", {})]
    assert isinstance(found.calls[2], Call) and found.calls[2].error is not None


def test_an_engine_that_goes_all_the_way_back_stays_at_its_start(
    train_config: Callable[..., TrainConfig], additions: list[dict[str, str]], tmp_path: Path
) -> None:
    config = train_config({**RUNS["training_engine"], "actor.engine.options": {"pull": 1.0}})
    run = train(config, reward=odd, data=additions)
    start, end = (load_policy(path).state_dict() for path in (config.model.path, export(run.run_dir, tmp_path / "end")))
    assert run.history[0]["actor/grad_norm"] > 0
    assert all(torch.equal(weight, start[name]) for name, weight in end.items())


@pytest.mark.slow
def test_every_kind_and_every_file_is_on_the_page() -> None:
    page = (ROOT / "docs" / "extending.md").read_text()
    files = {path.name for path in FOLDER.glob("*.py")}
    assert set(re.findall(r"\[`(\w+\.py)`\]", page)) == files
    assert {name.removesuffix(".py") for name in files} - ELSEWHERE - {"callback", "rollout_engine", "reward"} == {
        *RUNS,
        "tool_parser",
    }
    for kind in (*registry.KINDS, registry.HINTS):
        assert f"| {kind.kind} |" in page
