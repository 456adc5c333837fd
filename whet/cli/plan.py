# SPDX-License-Identifier: Apache-2.0
"""`whet plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from whet.cli.arguments import ConfigName, RecipeAndOverrides, split_recipe
from whet.cli.data import For, run_config_of


def plan(
    words: RecipeAndOverrides = None,
    config_name: ConfigName = None,
    command: For = None,
    device_memory: Annotated[
        float | None, typer.Option(help="GiB of an accelerator for each process, in place of what this machine has")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print numbers for a program")] = False,
) -> None:
    """Say what a run will need before it starts: memory, disk, time."""
    from whet.config import problems

    config = run_config_of(command, *split_recipe(words, config_name))

    from whet.cli.plan_page import numbers, show
    from whet.trainers.forecast import forecast

    made = forecast(config, device_memory)
    if as_json:
        typer.echo(numbers(made))
    else:
        show(made, problems(config))
    if not made.fits:
        raise typer.Exit(1)
