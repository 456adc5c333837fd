# SPDX-License-Identifier: Apache-2.0
"""The loop: it learns, it does what the config says and nothing else, and it does it again to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import whet
from whet import serialization
from whet.config import TrainConfig
from whet.metrics import Metrics
from whet.protocol import DataProto
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES
from whet.rollout.batch import to_batch
from whet.trainers.build import build, build_scorer, train
from whet.trainers.rl import add_rewards, fit, mini_batches
from whet.trainers.run import Run
from whet.types import Trajectory

MakeConfig = Callable[..., TrainConfig]
Rows = list[dict[str, str]]


def sevens(solution_str: str) -> float:
    """The share of an answer that is the character 7."""
    return solution_str.count("7") / 6


def length(solution_str: str) -> float:
    return float(len(solution_str))


def weights(run_dir: Path, step: int, role: str = "actor") -> torch.Tensor:
    """All weights that a checkpoint holds of a role, end to end."""
    state = serialization.load(run_dir / "checkpoints" / f"global_step_{step}" / f"{role}.state")
    return torch.cat([weight.flatten() for _, weight in sorted(state["model"].items())])


def untouched(model_folder: Path) -> torch.Tensor:
    """The weights that training starts from, in the same order."""
    from whet.models.load import load_policy

    return torch.cat([weight.detach().flatten() for _, weight in sorted(load_policy(model_folder).named_parameters())])


# ---- it learns


@pytest.mark.parametrize(
    "algorithm", [{}, {"algorithm.adv_estimator": "gae", "critic.optim.lr": 1e-3}], ids=["grpo", "ppo"]
)
def test_what_is_rewarded_is_said_more_often(
    algorithm: dict[str, Any], train_config: MakeConfig, additions: Rows
) -> None:
    overrides = {"rollout.n": 8, "trainer.total_steps": 25, "actor.optim.lr": 3e-3, **algorithm}
    run = train(train_config(overrides), reward=sevens, data=additions)
    scores = [record["critic/score/mean"] for record in run.history]
    assert scores[0] < 0.1 and sum(scores[-3:]) / 3 > 0.5, scores


def test_the_same_from_python_with_a_lambda_in_processes(
    model_folder: Path, additions: Rows, tmp_path: Path
) -> None:
    run = whet.train(
        reward=lambda solution_str: {"reward": len(solution_str), "accuracy": float("7" in solution_str)},
        data=additions,
        model={"path": model_folder},
        data_={} if False else None,
        **{"rollout.n": 2},
    )
    assert run
