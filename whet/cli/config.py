# SPDX-License-Identifier: Apache-2.0
"""`whet config`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from whet.cli.arguments import ConfigName, RecipeAndOverrides, split_recipe

NOTES_START_BY = 60  # columns; a longer value pushes its own note to the right, not everybody's


class Command(StrEnum):
    """The commands that read a config."""

    train = "train"
    sft = "sft"
    eval = "eval"
    generate = "generate"


def config(
    command: Annotated[Command, typer.Argument(help="whose config")],
    words: RecipeAndOverrides = None,
    config_name: ConfigName = None,
    meanings: Annotated[
        bool, typer.Option("--meanings", help="note what each key means instead of its source")
    ] = False,
) -> None:
    """Print a config, and where each of its values comes from."""
    from rich.console import Console
    from rich.text import Text

    from whet.config import EvalConfig, GenerateConfig, SFTConfig, TrainConfig, keyed_lines, load_config, problems
    from whet.config.keys import meaning
    from whet.config.load import DEFAULT
    from whet.config.schema import Section

    schemas: dict[Command, type[Section]] = {
        Command.train: TrainConfig,
        Command.sft: SFTConfig,
        Command.eval: EvalConfig,
        Command.generate: GenerateConfig,
    }
    schema = schemas[command]
    loaded = load_config(schema, *split_recipe(words, config_name), checked=False)
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
        errors.print(Text(f"\n`whet {command.value}` would refuse this:", style="yellow"))
        for each in found:
            errors.print(Text(f"- {each}"))
