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
        float | None, typer.Option(help="plan for accelerators with this many GiB, one for each process")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the numbers as JSON")] = False,
) -> None:
    """Estimate the memory, disk and time that a run needs.

    The exit status is 1 if the run does not fit."""
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
    """Forecasts a run from its config.  Raises: ConfigError, ModelError."""
    from whet.config import SFTConfig
    from whet.planning.forecast import forecast
    from whet.trainers import build, sft
    from whet.trainers.frame import run_folder

    setup = sft.setup if isinstance(config, SFTConfig) else build.setup
    return forecast(config, setup, run_folder(config.trainer), device_gib)
