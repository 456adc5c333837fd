# SPDX-License-Identifier: Apache-2.0
"""The command `whet config convert`; `whet config` parses its arguments and options."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from whet.errors import ConfigError
from whet.plugins.migration.convert import SYSTEMS, convert
from whet.plugins.migration.foreign_files import read
from whet.registry import register_command


@register_command("config convert")
def write_recipe(words: list[str], system: str | None, output: Path | None, variables: list[str]) -> None:
    """Converts a file or command to a recipe and prints it; with `output`, writes it and prints only its comments."""
    if len(words) != 1 or system is None:
        found = "--from is missing" if system is None else f"there are {len(words)} words before --from"
        expected = "one file, or one command in quotes, and the framework that it is of"
        change = f"write whet config convert run.sh --from {'|'.join(SYSTEMS)}"
        raise ConfigError("arguments", found, expected, change)
    if output is not None and output.exists():
        change = "name a new file, so that nothing is overwritten, or remove that one"
        raise ConfigError("-o", f"{output} exists", "a new file", change)
    pairs = [each.partition("=") if re.match(r"\w+=", each) else each.rpartition("=") for each in variables]
    if unset := next((each for each, pair in zip(variables, pairs, strict=True) if not pair[0]), None):
        raise ConfigError("--set", f"{unset} sets nothing", "NAME=VALUE, such as --set DEVICE=gpu", "add the value")
    fixed = {name: value for name, _, value in pairs}
    text = convert(read(words[0], system, fixed), system).to_yaml()
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("-o", f"{output}: {error.strerror}", "a file that can be written", "name another") from error
    typer.echo("".join(line for line in text.splitlines(keepends=True) if line.startswith("#")), nl=False)
    typer.echo(f"wrote {output}")
