# SPDX-License-Identifier: Apache-2.0
"""Reward processes in a pool of their own change none of a run's numbers."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.raising import check_fields, raises
from whet.config import TrainConfig
from whet.config.checks import problems
from whet.config.cluster import ClusterConfig
from whet.config.schema import ModelConfig, RewardConfig
from whet.controller.dispatch import register
from whet.controller.launch import launch_roles
from whet.controller.worker import Worker, WorkerSpec
from whet.errors import LostWorkerError, RewardError
from whet.roles.placed import PlacedRewards, RewardWorker
from whet.trainers.build import train
from whet.types import RewardItem, RewardResult

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
    with pytest.raises(RewardError, match=r"^reward function .*broken\.py|^all \d+ trajectories"):
        train(train_config(values), data=additions)
    values |= {"reward.function": f"{tmp_path}/broken.py:missing", "trainer.run_dir": str(tmp_path / "another")}
    with raises(RewardError, re.compile(r"broken\.py:missing")):
        train(train_config(values), data=additions)


def test_limits_of_calls_need_one_process(train_config: MakeConfig) -> None:
    placement = {"train": {"roles": ["actor"]}, "judge": {"roles": ["reward"], "processes": 2}}
    cluster = ClusterConfig.model_validate({"placement": placement})
    config = train_config().model_copy(update={"cluster": cluster})
    assert cluster.lists("reward") and problems(config, {"reward", "data"}) == []
    reward = config.reward.model_copy(update={"limits": {"requests_per_minute": 6}})
    limited = config.model_copy(update={"reward": reward})
    [said] = problems(limited, {"reward", "data"})
    check_fields(said, "cluster.placement.judge.processes", found=2, change=re.compile("reward.limits"))


class Actor(Worker):
    """A rank that does nothing."""

    @register()
    def pid(self) -> int:
        return os.getpid()


class Named(RewardWorker):
    """One that can be killed."""

    @register()
    def pid(self) -> int:
        return os.getpid()


@pytest.mark.slow
def test_items_go_to_the_rank_with_the_fewest_and_to_another_if_theirs_is_lost(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\ndef compute_score(solution_str):\n    time.sleep(float(solution_str))\n    return 1.0\n"
    )
    config = RewardConfig(function=f"{tmp_path}/slow.py:compute_score", num_workers=1)
    specs = [WorkerSpec("actor", Actor), WorkerSpec("reward", Named, (config, None, ModelConfig()))]
    placement = {"train": {"roles": ["actor"]}, "judge": {"roles": ["reward"], "processes": 2}}
    roles = launch_roles(specs, ClusterConfig.model_validate({"placement": placement, "deadline_seconds": 120.0}))
    scorer = PlacedRewards(roles["reward"])
    try:
        assert scorer.scores_alone
        pending = [scorer.submit_batch([RewardItem("s", "1", "", {"row": row})]) for row in range(6)]
        flights = scorer.ranks.fleet.flights
        assert [flights[each.uid].rank for each in pending] == [0, 1, 0, 1, 0, 1]
        assert [each.result()[0] for each in pending] == [RewardResult(1.0, 1.0)] * 6
        pids = [roles["reward"].start_on(rank, "pid").result() for rank in (0, 1)]
        pending = [scorer.submit_batch([RewardItem("s", "0.5", "")] * (1 + row)) for row in range(4)]
        os.kill(pids[0], signal.SIGKILL)
        assert [each.result() for each in pending] == [[RewardResult(1.0, 1.0)] * (1 + row) for row in range(4)]
        assert scorer.submit_batch([RewardItem("s", "0", "")]).result() == [RewardResult(1.0, 1.0)]
        assert roles["actor"].pid()  # the others live
        last = scorer.submit_batch([RewardItem("s", "60", "")])
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(LostWorkerError, match=r"^reward rank 1: .*serve: SIGKILL"):
            last.result()
        with pytest.raises(LostWorkerError):
            scorer.submit_batch([RewardItem("s", "0", "")])
    finally:
        roles["actor"].close()
