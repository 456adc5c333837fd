# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import pytest

from tests.raising import raises
from whet.errors import EngineError, RewardError, SandboxError, ToolError, WhetError
from whet.rollout.reports import FailureWatch
from whet.types import Failure, FailureSource, Group, Prompt, Trajectory

PROMPT = Prompt("0:0", 0, (), (), "s", None)


def group(*sources: FailureSource | None) -> list[Group]:
    """One group, an answer for each: None did not fail."""
    answers = [
        Trajectory(f"0:0:{i}", PROMPT, (), i, failure=None if source is None else Failure(source, f"why {i}"))
        for i, source in enumerate(sources)
    ]
    return [Group(PROMPT, tuple(answers))]


@pytest.mark.parametrize(
    ("source", "error"),
    [("reward", RewardError), ("sandbox", SandboxError), ("environment", EngineError), ("tool", ToolError)],
)
def test_where_nothing_ever_worked_the_first_batch_ends_the_run(source: FailureSource, error: type[WhetError]) -> None:
    found, change = re.compile(f" 0:0:0 in the {source}: why 0$"), re.compile(f" {source},")
    with raises(error, key="all 2 trajectories", found=found, change=change):
        FailureWatch().record(group(source, "engine"))


def test_what_worked_before_may_be_away_for_two_batches(caplog: pytest.LogCaptureFixture) -> None:
    watch = FailureWatch()
    watch.record(group(None, None))
    for _ in range(3):
        watch.record(group("reward", "reward"))
        watch.record(group("reward", "reward"))
        watch.record(group("reward", None))
    told: list[Any] = [record.args for record in caplog.records]
    assert [args[2] for args in told if args[0] == "all 2 trajectories"] == [2, 1] * 3
    assert [args[:4] for args in told if args[0] == 1] == [(1, 2, "reward", "why 0")]
    watch.record(group("reward"))
    watch.record([])
    watch.record(group("reward"))
    with raises(RewardError, key="all 1 trajectories"):
        watch.record(group("reward"))


def test_an_environment_that_fails_more_than_half_of_its_episodes_ends_the_run() -> None:
    half = FailureWatch()
    half.record(group("environment", "environment", None, None))
    key = "2 of 3 trajectories"
    with raises(EngineError, key=key, found=re.compile(" 0:0:0 .*environment: ")):
        FailureWatch().record(group("environment", "environment", None))
    with raises(ToolError, key=key, found=re.compile(" 0:0:0 .*tool: ")):
        FailureWatch().record(group("tool", "environment", None))
    with raises(SandboxError, key=key, found=re.compile(" 0:0:0 .*sandbox: ")):
        FailureWatch().record(group("sandbox", "tool", None))
    FailureWatch().record(group("reward", "reward", None))
    for _ in range(2):
        half.record(group("environment", "environment", None))
    with raises(EngineError, found=re.compile(" why 0$"), change=re.compile(" environment,")):
        half.record(group("environment", "environment", None))


def batch(num_failed: int, size: int = 4) -> list[Group]:
    return group(*["environment"] * num_failed, *[None] * (size - num_failed))


def test_good_batches_between_do_not_hide_that_more_than_half_fail() -> None:
    """0, 3, 3, 2, 3, 3, 2 and 3 of 4: no three in a row are over half, and together they are 19 of 32."""
    watch = FailureWatch()
    for num_failed in (0, 3, 3, 2, 3, 3, 2):
        watch.record(batch(num_failed))
    with raises(EngineError, key=re.compile("^19 of 32 .* 8 "), found=re.compile(" 0:0:0 .*environment: why")):
        watch.record(batch(3))


def test_half_of_the_last_eight_batches_may_fail() -> None:
    """The window of eight moves: 4, 4, 0 and 0 of 4 are half at every place; a batch of another size counts by its
    trajectories: with 0, 0, 4, 4, 0, 0 and 4 of 4 before (12 of 28) 9 of 9 are 21 of 37."""
    watch = FailureWatch()
    for num_failed in (0, *(4, 4, 0, 0) * 6):
        watch.record(batch(num_failed))
    watch.record(batch(4))
    watch.record([])
    with raises(EngineError, key=re.compile("^21 of 37 .* 8 ")):
        watch.record(batch(9, 9))


def test_a_batch_with_few_failures_ends_no_run() -> None:
    """1, 4, 4, 0, 4, 4, 0 and 0 of 4 are 17 of 32, as are 4, 4, 0, 4, 4, 0, 0 and 1; so are 4, 0, 4, 4, 0, 0, 1 and 4,
    of which the last one failed for the most part too."""
    watch = FailureWatch()
    for num_failed in (1, 4, 4, 0, 4, 4, 0, 0, 1):
        watch.record(batch(num_failed))
    with raises(EngineError, key=re.compile("^17 of 32 ")):
        watch.record(batch(4))


def test_failures_of_rewards_are_not_the_environment() -> None:
    watch = FailureWatch()
    for _ in range(20):
        watch.record(group("reward", "reward", "reward", None))
