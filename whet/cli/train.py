# SPDX-License-Identifier: Apache-2.0
"""`whet train`."""

from __future__ import annotations

from typing import Annotated

import typer

from whet.cli.arguments import ConfigName, RecipeAndOverrides, show_written, split_recipe
from whet.cli.stopping import shown_when_stopped


def train(
    words: RecipeAndOverrides = None,
    config_name: ConfigName = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="check everything, load one batch, stop")] = False,
) -> None:
    """Train a model with rewards: PPO, GRPO and their family."""
    from whet.config import TrainConfig, load_config

    loaded = load_config(TrainConfig, *split_recipe(words, config_name))

    from whet.tracking.long_phases import LongPhases
    from whet.trainers.build import train as run  # only now: a mistake in the config is shown before torch is loaded
    from whet.trainers.frame import run_folder

    with shown_when_stopped(), LongPhases().watch():
        run(loaded.config, dry_run=dry_run)
    if not dry_run:
        show_written(run_folder(loaded.config.trainer))
