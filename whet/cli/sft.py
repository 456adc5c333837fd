# SPDX-License-Identifier: Apache-2.0
"""`whet sft`."""

from __future__ import annotations

from whet.cli.arguments import ConfigName, RecipeAndOverrides, show_written, split_recipe
from whet.cli.stopping import shown_when_stopped


def sft(words: RecipeAndOverrides = None, config_name: ConfigName = None) -> None:
    """Train a model on examples: supervised fine-tuning."""
    from whet.config import SFTConfig, load_config

    loaded = load_config(SFTConfig, *split_recipe(words, config_name))

    from whet.tracking.long_phases import LongPhases
    from whet.trainers.frame import run_folder
    from whet.trainers.sft import train_sft

    with shown_when_stopped(), LongPhases().watch():
        train_sft(loaded.config)
    show_written(run_folder(loaded.config.trainer))
