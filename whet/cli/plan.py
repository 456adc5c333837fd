# SPDX-License-Identifier: Apache-2.0
"""`whet plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from whet.cli.arguments import ConfigName, RecipeAndOverrides, Sft, split_recipe, unchecked_config


def plan(
    words: RecipeAndOverrides = None,
    config_name: ConfigName = None,
    sft: Sft = False,
    as_json: Annotated[bool, typer.Option("--json", help="print numbers for a program")] = False,
) -> None:
    """Say what a run will need before it starts: memory, disk, time."""
    from whet.config import problems

    config = unchecked_config(*split_recipe(words, config_name), sft)

    from whet.cli.plan_page import numbers, show
    from whet.trainers.forecast import forecast

    made = forecast(config)
    if as_json:
        typer.echo(numbers(made))
        return
    show(made, problems(config))
