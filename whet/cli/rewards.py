# SPDX-License-Identifier: Apache-2.0
"""`whet rewards` lists score functions, or shows the rule and examples of one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

import typer
from rich.console import Console

from whet.cli.algorithms import console, facts, print_doc, print_kind, print_pairs
from whet.cli.arguments import Command
from whet.files import shipped_yaml
from whet.manifests import PLUGINS
from whet.registry import REWARDS, Entry
from whet.rewards.adapter import stand_ins

rewards = typer.Typer(help="List score functions, or show the rule and examples of one.")


@rewards.callback(invoke_without_command=True)
def list_all(context: typer.Context) -> None:
    """List score functions, or show the rule and examples of one."""
    if context.invoked_subcommand is not None:
        return
    output = console()
    print_kind(output, REWARDS)
    output.print("`whet rewards show NAME` prints rule, options, fields and examples.", style="dim")


@rewards.command(cls=Command)
def show(name: Annotated[str, typer.Argument(help="name that `whet rewards` lists, or path/file.py:function")]) -> None:
    """Print the rule of a score function, the fields that it reads, its options and examples."""
    with stand_ins():
        entry = REWARDS[name]
    output = Console(highlight=False, soft_wrap=True)
    print_doc(output, entry)
    print_pairs(output, [("reads" if title == "columns" else title, text) for title, text in facts(entry)])
    if shown := examples(entry):
        output.print("\nExamples:", style="dim")
        print_pairs(output, [(f"{reward:g}", text) for reward, text in shown])


@cache
def _table() -> dict[str, list[Any]]:
    files = ["rewards/examples.yaml", *map(str, sorted(PLUGINS.glob("*/examples.yaml")))]
    return {name: shown for file in files for name, shown in shipped_yaml(file).items()}


def examples_of(entry: Entry) -> list[Any]:
    """Returns a shipped function's examples. An example has response, ground truth, reward, and maybe other fields."""
    return _table().get(entry.alias_of or entry.name, [])


def examples(entry: Entry) -> list[tuple[float, str]]:
    """Formats the examples of a function as pairs of reward and call."""
    found: list[tuple[float, str]] = []
    for response, truth, reward, *more in examples_of(entry):
        fields: Mapping[str, object] = {"solution_str": response, "ground_truth": truth, **(more[0] if more else {})}
        found.append((reward, ", ".join(f"{name}={value!r}" for name, value in fields.items())))
    return found
