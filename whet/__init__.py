# SPDX-License-Identifier: Apache-2.0
"""whet: reinforcement learning for language models. Importing the package does not load torch."""

from __future__ import annotations

from whet import moved as moved
from whet.api import (
    evaluate as evaluate,
    export as export,
    generate as generate,
    plot as plot,
    run as run,
    sft as sft,
    train as train,
    train_reward as train_reward,
)
from whet.registry import (
    register_adv_est as register_adv_est,
    register_aggregation as register_aggregation,
    register_divergence as register_divergence,
    register_encoder as register_encoder,
    register_engine as register_engine,
    register_environment as register_environment,
    register_filter as register_filter,
    register_hint as register_hint,
    register_kl as register_kl,
    register_policy_loss as register_policy_loss,
    register_preference_loss as register_preference_loss,
    register_rejection as register_rejection,
    register_reward as register_reward,
    register_rollout as register_rollout,
    register_sampler as register_sampler,
    register_sandbox as register_sandbox,
    register_tool as register_tool,
    register_tool_parser as register_tool_parser,
    register_tracker as register_tracker,
    register_trainer as register_trainer,
    register_value_loss as register_value_loss,
    register_weight as register_weight,
    register_wrapper as register_wrapper,
)
from whet.version import __version__ as __version__
