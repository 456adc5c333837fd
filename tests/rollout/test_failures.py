# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from whet.errors import EngineError, RewardError, SandboxError, ToolError
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
def test_where_nothing_ever_worked_the_first_batch_ends_the_run(source: FailureSource, error: type[Exception]) -> None:
    said = rf"all 2 trajectories failed.*: trajectory 0:0:0 in the {source}: why 0\. Fix the {source}, then start again"
    with pytest.raises(error, match=said):
        FailureWatch().record(group(source, "engine"))


def test_what_worked_before_may_be_away_for_two_batches(caplog: pytest.LogCaptureFixture) -> None:
    watch = FailureWatch()
    watch.record(group(None, None))
    for _ in range(3):
        watch.record(group("reward", "reward"))
        watch.record(group("reward", "reward"))
        watch.record(group("reward", None))
    assert caplog.text.count("The run ends after 2 more such batches") == 3
    assert caplog.text.count("1 of 2 trajectories failed and are not trained on, the first in the reward: why 0") == 1
    watch.record(group("reward"))
    watch.record([])
    watch.record(group("reward"))
    with pytest.raises(RewardError, match="all 1 trajectories failed"):
        watch.record(group("reward"))


def test_an_environment_that_fails_more_than_half_of_its_episodes_ends_the_run() -> None:
    half = FailureWatch()
    half.record(group("environment", "environment", None, None))
    with pytest.raises(EngineError, match=r"2 of 3 trajectories, more than half, failed: trajectory 0:0:0 in the env"):
        FailureWatch().record(group("environment", "environment", None))
    with pytest.raises(ToolError, match=r"2 of 3 trajectories, more than half, failed: trajectory 0:0:0 in the tool"):
        FailureWatch().record(group("tool", "environment", None))
    with pytest.raises(
        SandboxError, match=r"2 of 3 trajectories, more than half, failed: trajectory 0:0:0 in the sand"
    ):
        FailureWatch().record(group("sandbox", "tool", None))
    FailureWatch().record(group("reward", "reward", None))
    for _ in range(2):
        half.record(group("environment", "environment", None))
    with pytest.raises(EngineError, match=r"why 0\. Fix the environment, then start again"):
        half.record(group("environment", "environment", None))


def batch(num_failed: int, size: int = 4) -> list[Group]:
    return group(*["environment"] * num_failed, *[None] * (size - num_failed))


def test_good_batches_between_do_not_hide_that_more_than_half_fail() -> None:
    """0, 3, 3, 2, 3, 3, 2 and 3 of 4: no three in a row are over half, and together they are 19 of 32."""
    watch = FailureWatch()
    for num_failed in (0, 3, 3, 2, 3, 3, 2):
        watch.record(batch(num_failed))
    said = (
        r"19 of 32 trajectories of the last 8 batches, more than half, failed: trajectory 0:0:0 in the environment: why"
    )
    with pytest.raises(EngineError, match=said):
        watch.record(batch(3))


def test_half_of_the_last_eight_batches_may_fail() -> None:
    """The window of eight moves: 4, 4, 0 and 0 of 4 are half at every place; a batch of another size counts by its
    trajectories: with 0, 0, 4, 4, 0, 0 and 4 of 4 before (12 of 28) 9 of 9 are 21 of 37."""
    watch = FailureWatch()
    for num_failed in (0, *(4, 4, 0, 0) * 6):
        watch.record(batch(num_failed))
    watch.record(batch(4))
    watch.record([])
    with pytest.raises(EngineError, match=r"21 of 37 trajectories of the last 8"):
        watch.record(batch(9, 9))


def test_a_batch_with_few_failures_ends_no_run() -> None:
    """1, 4, 4, 0, 4, 4, 0 and 0 of 4 are 17 of 32, as are 4, 4, 0, 4, 4, 0, 0 and 1; so are 4, 0, 4, 4, 0, 0, 1 and 4,
    of which the last one failed for the most part too."""
    watch = FailureWatch()
    for num_failed in (1, 4, 4, 0, 4, 4, 0, 0, 1):
        watch.record(batch(num_failed))
    with pytest.raises(EngineError, match=r"17 of 32"):
        watch.record(batch(4))


def test_failures_of_rewards_are_not_the_environment() -> None:
    watch = FailureWatch()
    for _ in range(20):
        watch.record(group("reward", "reward", "reward", None))
