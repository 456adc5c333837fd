# SPDX-License-Identifier: Apache-2.0
"""What the commands that read a config have in common: `[RECIPE] KEY=VALUE...`."""

from __future__ import annotations

from typing import Annotated

import typer

RecipeAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE KEY=VALUE",
        help="a shipped recipe by name or a YAML file by path, then values over it: rollout.n=8, ~key, data=gsm8k",
        show_default=False,
    ),
]
ConfigName = Annotated[
    str | None, typer.Option("--config-name", metavar="RECIPE", help="the recipe, said as Hydra says it", hidden=True)
]


def split_recipe(words: list[str] | None, config_name: str | None) -> tuple[str | None, list[str]]:
    """The recipe, if one is named, and the overrides: a first word that is no override is the recipe."""
    words = words or []
    if config_name is None and words and "=" not in words[0] and not words[0].startswith("~"):
        return words[0], words[1:]
    return config_name, words
