# SPDX-License-Identifier: Apache-2.0
"""Where the roles are changes nothing of what a run computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.config import TrainConfig
from whet.trainers.build import train

MakeConfig = Callable[..., TrainConfig]
PPO = {"algorithm.adv_estimator": "gae", "algorithm.kl.where": "reward", "actor.mini_batch_size": 2}
APART = {
    "train": {"roles": ["actor", "rollout"]},
    "value": {"roles": ["critic"]},
    "look": {"roles": ["ref"]},
}


def pays_for_sevens(solution_str: str) -> float:
    return float(solution_str.count("7"))


def metrics_of(config: TrainConfig, additions: list[dict[str, Any]]) -> str:
    train(config, reward=pays_for_sevens, data=additions)
    return (Path(str(config.trainer.run_dir)) / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_roles_in_pools_of_their_own_compute_the_same(
    train_config: MakeConfig, additions: list[dict[str, Any]], tmp_path: Path
) -> None:
    together = metrics_of(train_config({**PPO, "trainer.run_dir": tmp_path / "together"}), additions)
    placed = {**PPO, "cluster.placement": APART}
    assert metrics_of(train_config({**placed, "trainer.run_dir": tmp_path / "apart"}), additions) == together
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
    on_ray = {**placed, "cluster.backend": "ray", "cluster.address": "local", "trainer.run_dir": tmp_path / "ray"}
    assert metrics_of(train_config(on_ray), additions) == together
