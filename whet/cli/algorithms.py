# SPDX-License-Identifier: Apache-2.0
"""`whet algorithms`."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer

from whet.errors import RegistryError
from whet.registry import KINDS, REQUIRED, Entry

CHOSEN_BY = {  # where a kind of function is chosen, and where its options are given
    "advantage estimator": ("algorithm.adv_estimator", "algorithm.adv_options"),
    "policy loss": ("algorithm.policy_loss", "algorithm.loss_options"),
    "value loss": ("critic.value_loss", "critic.loss_options"),
    "aggregation": ("algorithm.loss_agg_mode", None),
    "KL form": ("algorithm.kl.form", None),
    "filter": ("algorithm.filter.name", "algorithm.filter.options"),
    "reward shaping": ("algorithm.overlong", None),
    "reward": ("reward.function", "reward.kwargs"),
    "environment": ("environment.name", "environment.options"),
}
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
            table.add_row(Text(entry.name, style="cyan"), Text(_line(entry)))
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
        facts = _facts(entry)
        width = max(len(title) for title, _ in facts) + 2
        output.print(Text(f"{entry.kind} {entry.name}", style="bold cyan"))
        output.print(Text(f"{entry.doc}\n"))
        for title, text in facts:
            output.print(Text.assemble((title.ljust(width), "bold"), text))
        output.print()


def _line(entry: Entry) -> str:
    if entry.alias_of is None:
        return entry.summary
    presets = {name: value for name, value in entry.options.items() if _original(entry).options[name] != value}
    return f"{entry.alias_of}{f' with {_listed(presets)}' if presets else ''}"


def _original(alias: Entry) -> Entry:
    registry = next(kind for kind in KINDS if kind.kind == alias.kind)
    return registry[alias.alias_of or alias.name]


def _facts(entry: Entry) -> list[tuple[str, str]]:
    key, options_key = CHOSEN_BY[entry.kind]
    facts = [("choose", f"{key}={entry.name}"), ("columns", ", ".join(entry.columns)), ("code", entry.target)]
    facts += [("alias of", entry.alias_of)] if entry.alias_of else []
    facts += [(f"fixes {mark}", str(value)) for mark, value in entry.marks.items()]
    if options_key is not None:
        facts += [(f"{options_key}.{name}", _default(value)) for name, value in entry.options.items()]
    return [(title, text) for title, text in facts if text]


def _listed(options: dict[str, object]) -> str:
    return ", ".join(f"{name}={_default(value)}" for name, value in options.items())


def _default(value: object) -> str:
    return "required" if value is REQUIRED else str(value)
