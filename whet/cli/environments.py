# SPDX-License-Identifier: Apache-2.0
"""`whet env`: lists and shows environments."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from whet.cli.algorithms import console, facts, print_doc, print_kind, print_pairs
from whet.cli.arguments import Command
from whet.registry import COMMANDS, ENVIRONMENTS

HELP = f"List environments; show{', play or check' * ('env check' in COMMANDS.shipped)} one."
environments = typer.Typer(help=HELP)
Name = Annotated[str, typer.Argument(help="a name that `whet env list` prints, or path/file.py:Class")]


@environments.callback(invoke_without_command=True, help=HELP)
def env(context: typer.Context) -> None:
    """Lists environments, unless a subcommand follows."""
    if context.invoked_subcommand is None:
        list_all()


@environments.command("list", cls=Command)
def list_all() -> None:
    """List the shipped environments and the ones of installed packages."""
    output = console()
    print_kind(output, ENVIRONMENTS)
    output.print("`whet env show NAME` prints one; `pip install ./examples/environments` adds games.", style="dim")


@environments.command(cls=Command)
def show(name: Name) -> None:
    """Print the description of an environment, and its options with their defaults."""
    entry = ENVIRONMENTS[name]
    output = Console(highlight=False, soft_wrap=True)
    print_doc(output, entry)
    print_pairs(output, [pair for pair in facts(entry) if pair[0] != "columns"])
