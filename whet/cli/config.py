# SPDX-License-Identifier: Apache-2.0
"""`whet config`."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.arguments import ConfigName, RecipeAndOverrides, split_recipe

if TYPE_CHECKING:
    from whet.config.section import Section

NOTES_START_BY = 60  # columns; a longer line moves only its own note to the right


class Command(StrEnum):
    """The commands that read a config."""

    train = "train"
    sft = "sft"
    eval = "eval"
    generate = "generate"


def config(
    command: Annotated[Command, typer.Argument(help="the command that reads the config")],
    words: RecipeAndOverrides = None,
    config_name: ConfigName = None,
    meanings: Annotated[
        bool, typer.Option("--meanings", help="show the meaning of each key instead of the source of its value")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="print the JSON Schema of recipe files, for editors")
    ] = False,
) -> None:
    """Print the resolved config with the source of each value."""
    from whet.config.schema import COMMANDS

    if schema:
        from whet.config.render import json_schema

        typer.echo(json.dumps(json_schema(COMMANDS[command]), indent=1))
    else:
        _print(COMMANDS[command], *split_recipe(words, config_name), meanings=meanings)


def _print(schema: type[Section], recipe: str | None, overrides: list[str], *, meanings: bool) -> None:
    """Prints the config line by line, each with its note, then the errors that the command would raise."""
    from rich.console import Console
    from rich.text import Text

    from whet.config import keyed_lines, load_config, problems
    from whet.config.keys import meaning
    from whet.config.load import DEFAULT

    loaded = load_config(schema, recipe, overrides, checked=False)
    lines = keyed_lines(loaded.config)
    width = max(len(line) for line, _ in lines if len(line) < NOTES_START_BY)
    output = Console(soft_wrap=True, highlight=False)
    for line, key in lines:
        if not key:
            output.print(line)
            continue
        source = loaded.source(key)
        note = meaning(schema, key) if meanings else source
        line_style, note_style = ("", "dim") if source == DEFAULT else ("bold", "cyan")
        output.print(Text.assemble((line.ljust(width), line_style), (f"  # {note}", note_style)))
    if found := problems(loaded.config):
        errors = Console(stderr=True, soft_wrap=True, highlight=False)
        errors.print(Text(f"\n`whet {schema.command}` would refuse this config:", style="yellow"))
        for each in found:
            errors.print(Text(f"- {each}"))
