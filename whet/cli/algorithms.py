# SPDX-License-Identifier: Apache-2.0
"""`whet algorithms`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.algorithms_page import (
    CHOSEN_BY,
    LEGEND,
    cells_of,
    certificate,
    certify_all,
    facts,
    notation,
    summary,
)
from whet.cli.algorithms_page import page as write_page
from whet.errors import RegistryError
from whet.registry import KINDS

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 160  # columns where there is no terminal to ask

algorithms = typer.Typer(help="List estimators, losses and rewards, or show the formula of one.")


@algorithms.callback(invoke_without_command=True)
def list_all(context: typer.Context) -> None:
    """List estimators, losses and rewards, or show the formula of one."""
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    output = Console(highlight=False)
    output.width = output.width if output.is_terminal else PLAIN_WIDTH
    for kind in KINDS:
        entries = list(kind)
        if not entries:
            continue
        output.print(Text.assemble((kind.kind, "bold"), (f"  {CHOSEN_BY[kind.kind][0]}", "dim")))
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        for entry in entries:
            table.add_row(Text(entry.name, style="cyan"), Text(summary(entry)))
        output.print(Padding(table, (0, 0, 1, 2)))
    output.print("`whet algorithms show NAME` prints formula, options and columns.", style="dim")


@algorithms.command()
def show(name: Annotated[str, typer.Argument(help="a name that `whet algorithms` lists")]) -> None:
    """Print the formula, the columns and the options of one."""
    from rich.console import Console
    from rich.text import Text

    entries = [kind[name] for kind in KINDS if name in kind]
    if not entries:
        known = sorted({each for kind in KINDS for each in kind.names()})
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`whet algorithms` lists all"
        raise RegistryError(f"nothing is called {name!r}; {hint}")
    output = Console(highlight=False, soft_wrap=True)
    for entry in entries:
        certified = certificate(entry)
        said = [*facts(entry), *certified]
        output.print(Text(f"{entry.kind} {entry.name}", style="bold cyan"))
        output.print(Text(f"{entry.doc}\n"))
        if notation(entry.kind):
            output.print(Text(f"In formulas: {notation(entry.kind)}.\n", style="dim"))
        _print_pairs(output, said)
        if certified:
            output.print("\nIn certificates:", style="dim")
            _print_pairs(output, list(LEGEND.items()))
        output.print()


@algorithms.command()
def certify() -> None:
    """Print how far every algorithm's expected gradient is from the objective's, computed exactly."""
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    output = Console(highlight=False)
    output.width = output.width if output.is_terminal else PLAIN_WIDTH
    found = certify_all(lambda rows: track(list(rows), "certificates", console=output, transient=True))
    table = Table(box=None, padding=(0, 1))
    for title in ("", "", *LEGEND):
        table.add_column(title, justify="left" if title in ("", "exact") else "right", no_wrap=True)
    for row in cells_of(found):
        table.add_row(*row)
    output.print(table)
    _print_pairs(output, list(LEGEND.items()))
    output.print("How it is computed: docs/algorithms.md", style="dim")


def _print_pairs(output: Console, pairs: Sequence[tuple[str, str]]) -> None:
    from rich.text import Text

    width = max(len(title) for title, _ in pairs) + 2
    for title, text in pairs:
        output.print(Text.assemble((title.ljust(width), "bold"), text))


@algorithms.command(hidden=True)
def page(path: Annotated[Path, typer.Argument(help="the file to write")] = Path("docs/algorithms.md")) -> None:
    """Write docs/algorithms.md."""
    path.write_text(write_page(certify_all()), encoding="utf-8")
