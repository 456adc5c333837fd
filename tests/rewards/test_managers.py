# SPDX-License-Identifier: Apache-2.0
"""Reward managers: as names for options of the pool, and as classes that users of verl and EasyR1 bring along."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises
from whet.config import TrainConfig, load_config
from whet.config.managers import MANAGERS
from whet.config.schema import ModelConfig, RewardConfig
from whet.errors import ConfigError, RegistryError, RewardError
from whet.models.load import load_tokenizer
from whet.rewards.adapter import adapt
from whet.rewards.pool import RewardPool, build_scorer
from whet.trainers.build import train
from whet.types import Failure, Outcome, RewardItem, RewardResult

PEERS = Path(__file__).with_name("peer_managers.py")
TIMES = """
import time
def each(solution_str):
    return time.monotonic()
async def wait(solution_str):
    return time.monotonic()
"""


def config(**values: Any) -> RewardConfig:
    return RewardConfig.model_validate({"num_workers": 1, "timeout_seconds": 60.0, **values})


# ---- names


@pytest.mark.parametrize("manager", ["naive", "batch", "prime", "dapo", "yr", "rate_limited"])
def test_a_manager_changes_what_is_not_set(manager: str) -> None:
    def values(*overrides: str) -> dict[str, Any]:
        loaded = load_config(TrainConfig, None, [f"reward.manager={manager}", *overrides], checked=False)
        changed = {key for key in MANAGERS[manager] if not any(each.startswith(f"reward.{key}=") for each in overrides)}
        assert all(loaded.source(f"reward.{key}") == f"reward.manager={manager}" for key in changed)
        found: dict[str, Any] = loaded.config.reward.model_dump()
        return found

    plain = {**RewardConfig().model_dump(), "manager": manager}
    assert values() == {**plain, **MANAGERS[manager]}
    assert RewardConfig.model_validate({"manager": manager}).model_dump() == values()
    own = {"num_workers": 3, "concurrency": 5, "function": "gsm8k"}
    assert values("reward.num_workers=3", "reward.concurrency=5", "reward.function=gsm8k") == {**plain, **own}


def one(solution_str: str) -> float:
    return float(len(solution_str))


def every(solution_strs: Sequence[str]) -> list[float]:
    return [float(len(each)) for each in solution_strs]


def either(**fields: Any) -> Any:
    if "solution_strs" in fields:
        assert sorted(fields) == ["data_sources", "extra_infos", "ground_truths", "solution_strs"]
        return [float(len(fields["solution_strs"]))] * len(fields["solution_strs"])
    return float(len(fields["solution_str"]))


def test_a_manager_requires_the_form_of_the_function_that_it_calls() -> None:
    items = [RewardItem("sums", text, "1") for text in ("a", "bc", "def")]

    def rewards(function: Callable[..., Any], manager: str | None) -> list[float]:
        scorer = build_scorer(config(manager=manager, num_workers=0), function)
        return [each.reward for each in scorer.submit_batch(items).result() if isinstance(each, RewardResult)]

    assert rewards(one, "naive") == rewards(every, "batch") == rewards(every, None) == [1.0, 2.0, 3.0]
    assert rewards(either, "batch") == [3.0] * 3
    assert rewards(either, "prime") == rewards(either, None) == [1.0, 2.0, 3.0]
    for function, manager, found in ((one, "batch", "one"), (every, "prime", "all")):
        expected = re.compile(f"reward.manager={manager}$")
        with raises(RewardError, re.compile(function.__name__), found=re.compile(f" {found} "), expected=expected):
            rewards(function, manager)


def test_dapo_needs_a_penalty_for_length(tmp_path: Path) -> None:
    with raises(ConfigError, "reward.manager", found="dapo", change=re.compile("algorithm.overlong.penalty=1")):
        load_config(TrainConfig, "gsm8k", ["reward.manager=dapo"])
    with pytest.raises(ConfigError) as raised:
        load_config(TrainConfig, "gsm8k", ["reward.manager=dapo", "algorithm.overlong.penalty=1"])
    assert "reward" not in str(raised.value)


def test_yr_scores_mathematics_and_programs() -> None:
    code = "```python\nprint(2 * int(input()))\n```"
    tests = {"inputs": ["3"], "outputs": ["6"]}
    items = [
        RewardItem("train-math-numinamath", r"\boxed{7}", "7"),
        RewardItem("train-code-taco", code, tests),
        RewardItem("mixed", code, '{"inputs": ["3"], "outputs": ["7"]}'),
        RewardItem("mixed", r"\boxed{\frac12}", "0.5"),
        RewardItem("mixed", r"\boxed{6}", '["5", "6"]', {"ability": "math"}),
    ]
    scorer = build_scorer(config(manager="yr", num_workers=0, kwargs={"sandbox": "unisolated"}))
    outcomes = scorer.submit_batch(items).result()
    assert [each.reward for each in outcomes if isinstance(each, RewardResult)] == [1.0, 1.0, 0.0, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"requests_per_minute": 1200}, {"tokens_per_minute": 2.4e6}])
@pytest.mark.parametrize("name", ["each", "wait"])
def test_limits_hold_for_all_processes_together(tmp_path: Path, name: str, limit: Mapping[str, float]) -> None:
    (tmp_path / "times.py").write_text(TIMES)
    given = config(function=f"{tmp_path}/times.py:{name}", manager="rate_limited", num_workers=2, limits=limit)
    scorer = build_scorer(given)
    try:
        items = [RewardItem("s", str(i), "1") for i in range(8)]
        start = time.monotonic()
        pending = [scorer.submit_batch(items), scorer.submit_batch(items)]
        begun = sorted(each.reward for one in pending for each in one.result() if isinstance(each, RewardResult))
    finally:
        scorer.close()
    assert len(begun) == 16
    for number, at in enumerate(begun):  # a call begins after it was sent
        assert number * 0.05 <= at - start < number * 0.05 + 5.0


def test_a_pool_that_waits_for_its_limit_closes_at_once(tmp_path: Path) -> None:
    (tmp_path / "times.py").write_text(TIMES)
    scorer = build_scorer(config(function=f"{tmp_path}/times.py:each", limits={"requests_per_minute": 1}))
    pending = scorer.submit_batch([RewardItem("s", str(i), "1") for i in range(3)])
    start = time.monotonic()
    scorer.close()
    assert time.monotonic() - start < 5.0
    with pytest.raises(RewardError):
        pending.result()


def test_limits_have_names() -> None:
    assert config(limits={"tokens_per_minute": 60_000}).seconds_between_calls == 2.0
    assert config(limits={"tokens_per_minute": 60_000, "tokens_per_request": 500}).seconds_between_calls == 0.5
    known = re.compile("requests_per_minute, tokens_per_minute")
    with raises(ConfigError, "reward.limits", found="requests", expected=known):
        load_config(TrainConfig, "gsm8k", ["reward.limits.requests=3"])


def test_limits_need_processes() -> None:
    with raises(ConfigError, "reward.limits", change=re.compile("reward.num_workers=1")):
        build_scorer(config(function="gsm8k", num_workers=0, limits={"requests_per_minute": 60}))


# ---- classes


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
