# SPDX-License-Identifier: Apache-2.0
"""Reward processes in a pool of their own change nothing of what a run computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.config import TrainConfig
from whet.config.checks import problems
from whet.config.cluster import ClusterConfig
from whet.errors import RewardError
from whet.trainers.build import train

MakeConfig = Callable[..., TrainConfig]
GRADER = (
    "def compute_score(solution_str): return {'reward': float(solution_str.count('7')), 'size': len(solution_str)}\n"
)
BROKEN = "import os\ndef compute_score(solution_str): os._exit(3)\n"
APART = {"train": {"roles": ["actor", "rollout"]}, "judge": {"roles": ["reward"]}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement", [APART, {"all": {"roles": ["actor", "rollout", "reward"]}}], ids=["apart", "here"]
)
def test_a_run_with_rewards_in_a_pool_computes_the_same(
    train_config: MakeConfig, additions: list[dict[str, Any]], tmp_path: Path, placement: dict[str, Any]
) -> None:
    (tmp_path / "grader.py").write_text(GRADER)
    values = {"reward.function": f"{tmp_path}/grader.py:compute_score", "reward.num_workers": 1}

    def lines(name: str, **more: Any) -> str:
        config = train_config({**values, "trainer.run_dir": str(tmp_path / name), **more})
        train(config, data=additions)
        return (tmp_path / name / "metrics.jsonl").read_text()

    assert lines("placed", **{"cluster.placement": placement}) == lines("here")


@pytest.mark.slow
def test_a_function_that_cannot_score_ends_the_run_with_the_reason(
    train_config: MakeConfig, additions: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    values: dict[str, Any] = {"reward.num_workers": 1, "cluster.placement": APART}
    values["reward.function"] = f"{tmp_path}/broken.py:compute_score"
    with pytest.raises(
        RewardError, match=r"in a row ended while scoring, the last for the response|trajectories failed"
    ):
        train(train_config(values), data=additions)
    values |= {"reward.function": f"{tmp_path}/broken.py:missing", "trainer.run_dir": str(tmp_path / "another")}
    with pytest.raises(RewardError, match=r"cannot be loaded in its process:\n.*has no 'missing'"):
        train(train_config(values), data=additions)


def test_the_pool_of_rewards_has_one_process(train_config: MakeConfig) -> None:
    def config(judge: dict[str, Any]) -> TrainConfig:
        placement = {"train": {"roles": ["actor"]}, "judge": judge}
        return train_config().model_copy(update={"cluster": ClusterConfig.model_validate({"placement": placement})})

    assert config({"roles": ["reward"]}).cluster.lists("reward")
    assert not config({"roles": ["rollout"]}).cluster.lists("reward")
    assert problems(config({"roles": ["reward"]}), {"reward", "data"}) == []
    [said] = problems(config({"roles": ["reward"], "processes": 2}), {"reward", "data"})
    assert said.startswith("cluster.placement.judge.processes=2 with the role reward; expected 1, which starts ")
