# SPDX-License-Identifier: Apache-2.0
"""The config of a run: its schema, its composition from recipe and overrides, and its checks. Imports no torch."""

from whet.config.algorithm_checks import aggregation as aggregation, uses_critic as uses_critic
from whet.config.checks import check as check, check_context as check_context, problems as problems
from whet.config.distill import DistillConfig as DistillConfig
from whet.config.load import (
    LoadedConfig as LoadedConfig,
    keyed_lines as keyed_lines,
    load_config as load_config,
    to_yaml as to_yaml,
)
from whet.config.preference import PreferenceConfig as PreferenceConfig, RewardTrainingConfig as RewardTrainingConfig
from whet.config.schema import (
    EvalConfig as EvalConfig,
    ExamplesConfig as ExamplesConfig,
    GenerateConfig as GenerateConfig,
    SFTConfig as SFTConfig,
    TrainConfig as TrainConfig,
)
