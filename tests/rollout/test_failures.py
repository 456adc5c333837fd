# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from whet.errors import EngineError, RewardError, SandboxError, ToolError
from whet.rollout.stream import FailureWatch
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
    FailureWatch().record(group("reward", "reward", None))
    for _ in range(2):
        half.record(group("environment", "environment", None))
    with pytest.raises(EngineError, match=r"why 0\. Fix the environment, then start again"):
        half.record(group("environment", "environment", None))
