# SPDX-License-Identifier: Apache-2.0
"""Parts that commands share: the look of their help, and `[RECIPE] KEY=VALUE...`."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption


class _Plain:
    """Commands whose help shows no type beside a flag, which takes no value."""

    def get_params(self, ctx: Any) -> Any:
        """Returns the parameters."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if isinstance(each, TyperOption) and each.is_flag and each.metavar is None:
                each.metavar = ""
        return params


class Command(_Plain, TyperCommand):
    """A command."""


class Group(_Plain, TyperGroup):
    """A command that has others."""


def program() -> str:
    """Returns how a shell calls this whet: by its name if that is found, else by its path (`.venv/bin/whet`)."""
    path = Path(sys.argv[0])
    return "whet" if shutil.which("whet") or path.name != "whet" else shlex.quote(str(path))


def complete(context: typer.Context, incomplete: str) -> list[str]:
    """Returns the recipes and keys that a word may become, for the shell."""
    from whet.config.compose import shipped_recipes
    from whet.config.keys import leaf_fields
    from whet.config.schema import COMMANDS, TrainConfig

    keys = leaf_fields(COMMANDS.get(context.info_name or "", TrainConfig))
    return [word for word in (*shipped_recipes(), *(f"{key}=" for key in keys)) if word.startswith(incomplete)]


RecipeAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE KEY=VALUE",
        help="a shipped recipe by name or a YAML file by path, then values over it: rollout.n=8, ~key, data=gsm8k",
        show_default=False,
        autocompletion=complete,
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
