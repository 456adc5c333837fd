# SPDX-License-Identifier: Apache-2.0
"""Reward pools from a config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from whet.config.schema import EvalConfig, RewardConfig, TrainConfig
from whet.errors import ConfigError
from whet.registry import REWARDS
from whet.rewards.pool import RewardPool, WeightedRewards

Rewards: TypeAlias = RewardPool | WeightedRewards


def scorer_of(config: TrainConfig | EvalConfig, function: Callable[..., Any] | None = None) -> Rewards | None:
    """The reward pool of a run; None where no function is named and an environment gives the rewards."""
    if function is None and not config.reward.function and config.environment.name != "single_turn":
        return None
    return build_scorer(config.reward, function)


def build_scorer(config: RewardConfig, function: Callable[..., Any] | None = None) -> Rewards:
    """The pool of one score function, or of several with weights.  Raises: RewardError, RegistryError."""
    names = [config.function] if isinstance(config.function, str) else list(config.function or [])
    functions: list[str | Callable[..., Any]] = [function] if function is not None else [*names]
    if not functions:
        known = ", ".join(REWARDS.names())
        raise ConfigError(f"reward.function is not set; registered: {known}; or name file.py:function")
    pools = [
        RewardPool(
            each,
            num_workers=config.num_workers,
            timeout_seconds=config.timeout_seconds,
            correct_threshold=config.correct_threshold,
            kwargs=config.kwargs,
        )
        for each in functions
    ]
    if len(pools) == 1:
        return pools[0]
    weights = config.weights or [1.0] * len(pools)
    short = [name.rpartition(":")[2] for name in names]
    labels = short if len(set(short)) == len(short) else names
    return WeightedRewards(list(zip(labels, pools, weights, strict=True)))
