# SPDX-License-Identifier: Apache-2.0
"""The placement of the roles changes none of a run's numbers."""

from __future__ import annotations

import json
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


@pytest.mark.slow
def test_what_is_validated_beside_training_is_what_would_be_validated_before(
    train_config: MakeConfig, additions: list[dict[str, Any]], tmp_path: Path
) -> None:
    """A rollout apart validates a step while the next one trains: the lines are the same, and in the same order."""
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in additions]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    validated = {"data.val_files": [str(tmp_path / "val.jsonl")], "trainer.val_freq": 1, "trainer.total_steps": 3}
    alone = metrics_of(train_config({**validated, "trainer.run_dir": tmp_path / "alone"}), additions)
    placement = {"train": {"roles": ["actor"]}, "sample": {"roles": ["rollout"]}}
    apart = train_config({**validated, "cluster.placement": placement, "trainer.run_dir": tmp_path / "apart"})
    assert metrics_of(apart, additions) == alone
    assert [json.loads(line)["step"] for line in alone.splitlines()] == [0, 1, 2, 3]
