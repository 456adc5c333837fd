# SPDX-License-Identifier: Apache-2.0
"""`whet rewards`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from whet.cli.algorithms import console, facts, print_kind, print_pairs
from whet.cli.arguments import Command
from whet.registry import REWARDS, Entry

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
def show(
    name: Annotated[str, typer.Argument(help="a name that `whet rewards` lists, or path/file.py:function")],
) -> None:
    """Print the rule of a score function, the fields that it reads, its options and examples."""
    from rich.console import Console
    from rich.text import Text

    entry = REWARDS[name]
    output = Console(highlight=False, soft_wrap=True)
    output.print(Text(f"{entry.kind} {entry.name}", style="bold cyan"))
    output.print(Text(f"{entry.doc}\n"))
    print_pairs(output, [("reads" if title == "columns" else title, text) for title, text in facts(entry)])
    if "examples" in entry.marks:
        output.print("\nExamples:", style="dim")
        print_pairs(output, [(f"{reward:g}", text) for reward, text in examples(entry)])


def examples(entry: Entry) -> list[tuple[float, str]]:
    """Reward and call of each example in the mark `examples`: (response, ground truth, reward[, other fields])."""
    found: list[tuple[float, str]] = []
    for response, truth, reward, *more in entry.marks["examples"]:
        fields: Mapping[str, Any] = {"solution_str": response, "ground_truth": truth, **(more[0] if more else {})}
        found.append((reward, ", ".join(f"{name}={value!r}" for name, value in fields.items())))
    return found
