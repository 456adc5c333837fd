# SPDX-License-Identifier: Apache-2.0
"""Reward managers as classes that users of verl and EasyR1 bring along."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises
from whet.config import TrainConfig
from whet.config.schema import ModelConfig, RewardConfig
from whet.errors import RegistryError, RewardError
from whet.models.load import load_tokenizer
from whet.rewards.adapter import adapt
from whet.rewards.pool import RewardPool, build_scorer
from whet.trainers.build import train
from whet.types import Failure, Outcome, RewardItem, RewardResult

PEERS = Path(__file__).with_name("peer_managers.py")


def config(**values: Any) -> RewardConfig:
    return RewardConfig.model_validate({"num_workers": 1, "timeout_seconds": 60.0, **values})


@pytest.fixture(scope="module")
def items(model_folder: Path) -> list[RewardItem]:
    tokenizer = load_tokenizer(model_folder)

    def item(text: str, truth: str) -> RewardItem:
        ids, prompt = (tuple(tokenizer.encode(each, add_special_tokens=False)) for each in (text, "2+3="))
        return RewardItem("sums", text, truth, {"level": 1}, "2+3=", prompt[: 1 + len(text)], ids)

    return [item("5", "5"), item("123", "5"), item("12", "12")]


def outcomes_of(name: str, items: Sequence[RewardItem], folder: Path, **kwargs: Any) -> list[Outcome]:
    num_workers = int(name == "InProcesses")  # the runs below have processes
    given = config(function=f"{PEERS}:{name}", kwargs=kwargs, num_workers=num_workers)
    scorer = build_scorer(given, model=ModelConfig(path=str(folder)))
    try:
        return scorer.submit_batch(items).result()
    finally:
        scorer.close()


SCORE, SCORE_ALL = f"{PEERS}:score", f"{PEERS}:score_all"
BUFFER = {"len": 2, "penalty_factor": 0.5, "log": True}
EASYR1 = {"reward_function": str(PEERS), "reward_function_name": "overall", "reward_function_kwargs": {}}
BY_CLASS: dict[str, dict[str, Any]] = {
    "OneByOne": {"compute_score": SCORE},
    "HandsOn": {"compute_score": SCORE, "bonus": 1.0},
    "AllAtOnce": {"compute_score": SCORE_ALL, "scale": 2.0},
    "InProcesses": {"compute_score": SCORE},
    "Overlong": {"compute_score": SCORE, "max_resp_len": 3, "overlong_buffer_cfg": BUFFER},
    "OneRow": {"compute_score": SCORE, "config": {"reward_model": {"max_concurrent": 2}}},
    "Configured": {"config": EASYR1},
    "compute_reward": {"scale": 3.0},
}
PAID = {
    "OneByOne": [1.0, -1.0, 1.0],
    "HandsOn": [1.0, -1.0, 1.0],
    "AllAtOnce": [2.0, -2.0, 2.0],
    "InProcesses": [1.0, -1.0, 1.0],
    "Overlong": [1.0, -1.5, 0.75],  # free up to one token, then a quarter for each
    "OneRow": [1.0, -1.0, 1.0],
    "Configured": [1.0, 0.1, 1.0],
    "compute_reward": [3.0, 0.0, 3.0],
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "InProcesses" else name for name in BY_CLASS]
)
def test_managers_of_verl_and_easyr1_score_as_they_are(items: list[RewardItem], model_folder: Path, name: str) -> None:
    found = outcomes_of(name, items, model_folder, **BY_CLASS[name])
    results = [each for each in found if isinstance(each, RewardResult)]
    assert [each.reward for each in results] == pytest.approx(PAID[name]), found
    assert [each.accuracy for each in results] == [1.0, 0.0, 1.0]
    if name in ("OneByOne", "Overlong"):  # on the last token, as the manager says
        rewards = zip(results, items, strict=True)
        assert all(each.token_rewards == (0.0,) * (len(of.response_ids) - 1) + (each.reward,) for each, of in rewards)
    parts = {
        "OneByOne": {"score": [1.0, -1.0, 1.0]},
        "HandsOn": {"score": [1.0, -1.0, 1.0]},
        "Overlong": {"score": [1.0, -1.0, 1.0], "overlong_reward": [0.0, -0.5, -0.25], "overlong": [0.0, 1.0, 1.0]},
        "OneRow": {"score": [1.0, -1.0, 1.0]},
        "Configured": {"overall": [1.0, 0.1, 1.0], "format": [1.0, 1.0, 1.0]},
        "compute_reward": {"length": [1.0, 3.0, 2.0]},
    }.get(name, {})
    assert [dict(each.parts) for each in results] == [
        {part: values[row] for part, values in parts.items()} for row in range(3)
    ]
    if "compute_score" in BY_CLASS[name] and name in ("OneByOne", "Overlong", "OneRow"):
        assert [each.extracted for each in results] == ["5", "123", "12"]


@pytest.mark.slow
def test_a_manager_without_a_function_gets_the_one_for_the_data_source(
    items: list[RewardItem], model_folder: Path
) -> None:
    items = [RewardItem("openai/gsm8k", "#### 5", "5", {}, "", (1,), each.response_ids) for each in items]
    found = outcomes_of("InProcesses", items, model_folder)
    assert [each.reward for each in found if isinstance(each, RewardResult)] == [0.0] * 3  # the ids say 5, 123, 12
    shipped = outcomes_of("OneByOne", items, model_folder, compute_score="exact_match")
    assert [each.reward for each in shipped if isinstance(each, RewardResult)] == [1.0, 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_CLASS)
def test_a_run_with_a_manager_of_verl_or_easyr1(
    train_config: Callable[..., TrainConfig], additions: list[dict[str, str]], name: str
) -> None:
    values = {"reward.function": f"{PEERS}:{name}", "reward.num_workers": 1, "trainer.total_steps": 1}
    limit = train_config().data.max_response_length
    kwargs = {**BY_CLASS[name], **({"max_resp_len": limit} if name == "Overlong" else {})}
    run = train(train_config({**values, "reward.kwargs": kwargs}), data=additions)
    [metrics] = run.history
    assert metrics.get("failures/reward", 0) == 0 and metrics["actor/grad_norm"] >= 0


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("Nothing", {}, "^class Nothing: .*run_single, compute_reward, __call__"),
        ("Picky", {}, "^Picky.*: bonus is not set.*reward.kwargs.bonus"),
        ("Picky", {"bonus": 0}, "^manager Picky: ZeroDivisionError.*compute_score"),
        ("OneRow", {"bonus": 1}, "^reward.kwargs.bonus: .*OneRow"),
        ("Configured", {}, "^manager Configured: .*reward_function.*reward.kwargs"),
        ("OneByOne", {"compute_score": "gsm9k"}, "gsm9k.*'gsm8k'"),
    ],
)
def test_a_manager_that_cannot_be_made(model_folder: Path, name: str, kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises((RewardError, RegistryError), match=f"(?s){said}"):
        RewardPool(
            f"{PEERS}:{name}",
            num_workers=0,
            timeout_seconds=5.0,
            correct_threshold=1.0,
            kwargs=kwargs,
            tokenizer=(str(model_folder), False),
        )


def test_a_manager_without_a_tokenizer() -> None:
    with raises(RewardError, "model.path", found=None, expected=re.compile("OneByOne")):
        build_scorer(config(function=f"{PEERS}:OneByOne", num_workers=0))


def test_wrong_results_of_a_manager_are_failures(items: list[RewardItem]) -> None:
    def short(data: Any, return_dict: bool = False) -> dict[str, Any]:
        assert return_dict
        return {"reward_tensor": [1.0] * len(data), "reward_extra_info": {"acc": [1.0]}}

    found = adapt(short, kwargs={}, correct_threshold=1.0).score(items)
    assert [isinstance(each, Failure) and each.message.startswith("acc: 1 ") for each in found] == [True] * 3
