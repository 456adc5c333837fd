# SPDX-License-Identifier: Apache-2.0
"""`whet plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.arguments import ConfigName, RecipeAndOverrides, split_recipe
from whet.cli.data import For, run_config_of

if TYPE_CHECKING:
    from whet.config.schema import SFTConfig, TrainConfig
    from whet.planning.forecast import Forecast


def plan(
    words: RecipeAndOverrides = None,
    config_name: ConfigName = None,
    command: For = None,
    device_memory: Annotated[
        float | None, typer.Option(help="GiB of an accelerator for each process, in place of what this machine has")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print numbers for a program")] = False,
) -> None:
    """Say what a run will need before it starts: memory, disk, time.

    The exit status is 1 where it does not fit."""
    from whet.config import problems

    config = run_config_of(command, *split_recipe(words, config_name))

    from whet.cli.plan_page import numbers, show

    made = forecast_of(config, device_memory)
    if as_json:
        typer.echo(numbers(made))
    else:
        show(made, problems(config))
    if not (made.fits and made.fits_on_disk):
        raise typer.Exit(1)


def forecast_of(config: TrainConfig | SFTConfig, device_gib: float | None = None) -> Forecast:
    """The forecast of a run, with the roles of its trainer.  Raises: ConfigError, ModelError."""
    from whet.config import SFTConfig
    from whet.planning.forecast import forecast
    from whet.trainers import build, sft
    from whet.trainers.frame import run_folder

    setup = sft.setup if isinstance(config, SFTConfig) else build.setup
    return forecast(config, setup, run_folder(config.trainer), device_gib)
