# SPDX-License-Identifier: Apache-2.0
"""whet: reinforcement learning for language models. Importing the package does not load torch."""

from __future__ import annotations

from whet.api import evaluate, export, generate, plot, sft, train, train_reward
from whet.registry import (
    register_adv_est,
    register_aggregation,
    register_engine,
    register_environment,
    register_filter,
    register_hint,
    register_kl,
    register_policy_loss,
    register_rejection,
    register_reward,
    register_rollout,
    register_sampler,
    register_tool,
    register_tool_parser,
    register_value_loss,
    register_weight,
    register_wrapper,
)

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "evaluate",
    "export",
    "generate",
    "plot",
    "register_adv_est",
    "register_aggregation",
    "register_engine",
    "register_environment",
    "register_filter",
    "register_hint",
    "register_kl",
    "register_policy_loss",
    "register_rejection",
    "register_reward",
    "register_rollout",
    "register_sampler",
    "register_tool",
    "register_tool_parser",
    "register_value_loss",
    "register_weight",
    "register_wrapper",
    "sft",
    "train",
    "train_reward",
]
