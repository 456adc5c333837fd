# SPDX-License-Identifier: Apache-2.0
"""Reward managers as names for options of the pool, and limits of calls."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.first import first
from tests.raising import raises
from whet.config import TrainConfig, load_config
from whet.config.managers import MANAGERS
from whet.config.schema import RewardConfig
from whet.errors import ConfigError, RewardError
from whet.rewards.pool import build_scorer
from whet.types import RewardItem, RewardResult

TIMES = """
import time
def each(solution_str):
    return time.monotonic()
async def wait(solution_str):
    return time.monotonic()
"""


def config(**values: Any) -> RewardConfig:
    return RewardConfig.model_validate({"num_workers": 1, "timeout_seconds": 60.0, **values})


@pytest.mark.parametrize(
    "manager", first(1, ["naive", "batch", "prime", "dapo", "yr", "rate_limited"], others=pytest.mark.slow)
)
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
