# SPDX-License-Identifier: Apache-2.0
"""The config of a run: its schema, how recipes and overrides become one, what may not be combined. No torch."""

from whet.config.algorithm_checks import aggregation, uses_critic
from whet.config.checks import check, check_context, problems
from whet.config.load import Loaded, load_config, read_config
from whet.config.render import keyed_lines, to_yaml
from whet.config.schema import EvalConfig, ExamplesConfig, GenerateConfig, RewardTrainingConfig, SFTConfig, TrainConfig

__all__ = [
    "EvalConfig",
    "ExamplesConfig",
    "GenerateConfig",
    "Loaded",
    "RewardTrainingConfig",
    "SFTConfig",
    "TrainConfig",
    "aggregation",
    "check",
    "check_context",
    "keyed_lines",
    "load_config",
    "problems",
    "read_config",
    "to_yaml",
    "uses_critic",
]
