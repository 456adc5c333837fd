# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands share (`[RECIPE] KEY=VALUE...`), and the layout of their help."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from whet.errors import ConfigError
from whet.manifests import absent, missing_plugin
from whet.registry import COMMANDS, TRAINERS, Entry


class _Plain:
    """Mixin for the help of commands: flags show no type, lists the type of an element, choices have spaces between."""

    def get_params(self, ctx: object) -> Any:
        """Returns the parameters, after adjusting how help shows their types."""
        params = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if isinstance(each, TyperOption) and each.is_flag and each.metavar is None:
                each.metavar = ""
            if hasattr(each, "display_type"):  # not in older versions of typer
                each.display_type = partial(_readable, type(each).display_type, each)
        return params


def _readable(shown: Callable[[object, object], str], param: object, ctx: object) -> str:
    """Formats the type of a parameter with spaces at which a line of help can break."""
    element = re.fullmatch(r"<list\[(.*)\]>", shown(param, ctx))
    return (f"<{element[1].lower()}>" if element else shown(param, ctx)).replace("|", " | ")


class Command(_Plain, TyperCommand):
    """A command whose help shows types in the form of `_Plain`."""


class CommandGroup(_Plain, TyperGroup):
    """A command with subcommands. Subcommands of plugins are imported only when called, so help imports none."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the name, the command and its arguments.  Raises: RegistryError if the plugin was deleted."""
        whole = args[0] if ctx.parent is None else f"{ctx.info_name} {args[0]}"
        if self.get_command(ctx, args[0]) is None and (plugin := missing_plugin("command", whole)):
            raise absent(f"whet {whole}", plugin)
        name, command, rest = super().resolve_command(ctx, args)
        return name, _loaded(COMMANDS.shipped[whole]) if whole in COMMANDS.shipped else command, rest


def _loaded(entry: Entry) -> Any:
    """Imports a plugin's command and returns it."""
    own, name = typer.Typer(add_completion=False), entry.name.rpartition(" ")[2]
    own.command(name, cls=Command, context_settings=entry.marks.get("settings"))(entry.load())
    return get_command(own)


def program() -> str:
    """Returns the shell command for this program: `whet` if it is on the PATH, else its path (`.venv/bin/whet`)."""
    path = Path(sys.argv[0])
    return "whet" if shutil.which("whet") or path.name != "whet" else shlex.quote(str(path))


def complete(context: typer.Context, incomplete: str) -> list[str]:
    """Returns the recipes and config keys that begin with `incomplete`, for completion in the shell."""
    from whet.config.commands import READERS, schema_of
    from whet.config.compose import shipped_recipes
    from whet.config.section import leaf_fields

    name = context.info_name or ""
    keys = leaf_fields(schema_of(name if name in READERS or name in TRAINERS else "train"))
    return [word for word in (*shipped_recipes(), *(f"{key}=" for key in keys)) if word.startswith(incomplete)]


RecipeAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE KEY=VALUE",
        help="a shipped recipe (by name) or a YAML file (by path), then overrides: rollout.n=8, ~key, data=gsm8k",
        show_default=False,
        autocompletion=complete,
    ),
]
ConfigName = Annotated[
    str | None,
    typer.Option("--config-name", "--config_name", metavar="RECIPE", help="the recipe, in Hydra's syntax", hidden=True),
]
DeviceMemory = Annotated[float | None, typer.Option(help="plan for accelerators of this many GiB, one per process")]
HostMemory = Annotated[float | None, typer.Option(help="plan for nodes of this many GiB, with disks large enough")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="run Python code of the model's folder")]
KeyValues = Annotated[list[str] | None, typer.Option("--option", metavar="KEY=VALUE", help="an option; repeatable")]


def split_recipe(words: list[str] | None, config_name: str | None) -> tuple[str | None, list[str]]:
    """Splits arguments into recipe (or None) and overrides. The first is the recipe if it is no override, or a file."""
    first, *rest = words or [""]
    is_file = first.endswith(".yaml") and os.path.isfile(first)  # noqa: PTH113  # never raises
    is_recipe = is_file or not ("=" in first or first.startswith("~"))
    return (first, rest) if words and config_name is None and is_recipe else (config_name, words or [])


def read_options(words: list[str], name: str = "--option") -> dict[str, Any]:
    """Reads options of the form KEY=VALUE; VALUE is YAML.  Raises: ConfigError."""
    import yaml

    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(name, f"{word} has no value", f"{name} KEY=VALUE", "add the value")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{name} {word}", f"cannot be read: {error}", "a value as YAML", "quote it") from error
    return options
