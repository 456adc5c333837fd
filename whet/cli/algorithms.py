# SPDX-License-Identifier: Apache-2.0
"""`whet algorithms`: lists the registered functions, and shows the formula, columns and options of one."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal, get_origin

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from whet.cli.arguments import Command
from whet.errors import RegistryError, did_you_mean
from whet.files import shipped_yaml
from whet.options import bounds_of, words
from whet.registry import KINDS, REQUIRED, TOOLS, WRAPPERS, Entry, Registry, load_target

UNLIMITED = 10_000  # console width where the output is no terminal, so that no line is wrapped


@cache
def chosen_by() -> dict[str, tuple[str, str | None]]:
    """Maps each kind of function to the first config key that selects such a function, and to the key of options."""
    from whet.config.distill import DistillConfig
    from whet.config.preference import PreferenceConfig
    from whet.config.schema import TrainConfig
    from whet.config.section import choices

    found = {
        choice.registry: (key, choice.options and choice.options_key(key))
        for schema in (DistillConfig, PreferenceConfig, TrainConfig)
        for key, choice in reversed(list(choices(schema).items()))
    }
    found[TOOLS] = "environment.tools", None  # a list, in which each entry has its options
    return {kind.kind: found.get(kind, ("algorithm.adv_options.wrap_method", None)) for kind in KINDS}


algorithms = typer.Typer(help="List estimators, losses and rewards, or show a formula.")


@algorithms.callback(invoke_without_command=True)
def list_all(context: typer.Context) -> None:
    """List estimators, losses and rewards, or show a formula."""
    if context.invoked_subcommand is not None:
        return
    output = console()
    for kind in KINDS:
        print_kind(output, kind)
    output.print("`whet algorithms show NAME` prints formula, options and columns.", style="dim")


def console() -> Console:
    """Returns a console that prints lists in full width, unless it is a terminal."""
    output = Console(highlight=False)
    output.width = output.width if output.is_terminal else UNLIMITED
    return output


def print_kind(output: Console, kind: Registry) -> None:
    """Prints the functions of a kind, one a line; prints nothing for a kind without functions."""
    entries = list(kind)
    if not entries:
        return
    output.print(Text.assemble((kind.kind, "bold"), (f"  {chosen_by()[kind.kind][0]}", "dim")))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=max(len(entry.name) for entry in entries))
    table.add_column(overflow="fold")
    for entry in entries:
        table.add_row(Text(entry.name, style="cyan"), Text(summary(entry)))
    output.print(Padding(table, (0, 0, 1, 2), expand=False))


@algorithms.command(cls=Command)
def show(
    name: Annotated[str, typer.Argument(help="a name that `whet algorithms` lists, or path/file.py:function")],
) -> None:
    """Print the formula, the columns and the options of a registered function."""
    output = Console(highlight=False, soft_wrap=True)
    for entry in entries_of(name):
        certified = certificate(entry)
        properties = [*facts(entry), *certified]
        print_doc(output, entry)
        if notation(entry.kind):
            output.print(Text(f"In formulas: {notation(entry.kind)}.\n", style="dim"))
        print_pairs(output, properties)
        if certified:
            output.print("\nIn certificates:", style="dim")
            print_pairs(output, list(legend().items()))
        output.print()


def entries_of(name: str) -> list[Entry]:
    """Finds the registered functions of this name, at most one of each kind.  Raises: RegistryError."""
    if found := [kind[name] for kind in KINDS if name in kind]:
        return found
    if ":" in name:
        function = load_target(name)
        if found := [replace(entry, name=name) for kind in KINDS if (entry := kind.registered(function))]:
            return found
        decorators = ", ".join(f"@{kind.decorator}" for kind in KINDS)
        raise RegistryError(name, "not registered", f"one of these decorators on it: {decorators}", "add it")
    known = sorted({each for kind in KINDS for each in kind.names()})
    hint = did_you_mean(name, known, "correct the name", quoted=False, most=3)
    expected = "a name that `whet algorithms` lists, or path/file.py:function"
    raise RegistryError("registered function", name, expected, hint)


def print_doc(output: Console, entry: Entry) -> None:
    """Prints the name and the docstring of a function."""
    output.print(Text(f"{entry.kind} {entry.name}", style="bold cyan"))
    output.print(Text(f"{entry.doc}\n"))


def print_pairs(output: Console, pairs: Sequence[tuple[str, str]]) -> None:
    """Prints a line for each pair of title and text."""
    width = max(len(title) for title, _ in pairs) + 2
    for title, text in pairs:
        output.print(Text.assemble((title.ljust(width), "bold"), text))


def number(error: float) -> str:
    """Formats a relative error. An error below 1e-12 is rounding, and its digits have no meaning."""
    return "< 1e-12" if error < 1e-12 else f"{error:.2f}"


@cache
def shipped() -> dict[tuple[str, str], list[str]]:
    """Reads the certificates (bias of updates) that `make pages` writes, by kind and name; a test recomputes them."""
    text = resources.files("whet.algorithms").joinpath("certificates.csv").read_text(encoding="utf-8")
    return {(kind, name): numbers for kind, name, *numbers in list(csv.reader(text.splitlines()))[1:]}


def certificate(entry: Entry) -> list[tuple[str, str]]:
    """Returns the verdict on a function and its shipped certificate, as pairs of title and text."""
    found = []
    for kind in (entry.kind, "KL in the reward", "KL in the loss"):
        if numbers := shipped().get((kind, entry.name)):
            title = "certificate" if kind == entry.kind else f"certificate, {kind}"
            shown = ", ".join(f"{name} {cell}" for name, cell in zip(legend(), numbers, strict=True) if cell)
            said = verdict(kind, entry.name, numbers)
            found += [("verdict" + title.removeprefix("certificate"), said), (title, shown)]
    if not found and not entry.target.startswith("whet.") and entry.kind in {kind for kind, _ in shipped()}:
        return [("verdict", f"not known: `whet algorithms certify {entry.name}` computes a certificate")]
    return found


def verdict(kind: str, name: str, numbers: Sequence[str]) -> str:
    """Puts a certificate of `whet algorithms certify` into words: whether the expected update is biased, and why."""
    exact, error, cosine, length, *_ = numbers
    if exact or error == number(0.0):
        return "unbiased: the expected step is the gradient of the objective"
    why = _texts()["bias"].get(kind, {}).get(name)
    if float(cosine) >= 0.9995 and why is None:
        return f"unbiased but for its length, {length} of the gradient's length: the learning rate can correct it"
    degrees = math.degrees(math.acos(float(cosine)))
    angle = f"the expected step is {degrees:.0f} degrees off the gradient of the objective, and {length} of its length"
    return f"biased by design: {why}; {angle}" if why else f"biased: {angle}"


def facts(entry: Entry) -> list[tuple[str, str]]:
    """Returns facts about a function in pairs of title and text: key, columns, code, options, names in other tools."""
    key, options_key = chosen_by()[entry.kind]
    kind = next(kind for kind in KINDS if kind.kind == entry.kind)
    reads = entry.columns if kind not in (WRAPPERS, TOOLS) and kind.supplied is None else ()
    found = [("choose", f"{key}={entry.name}"), ("columns", ", ".join(reads)), ("code", entry.target)]
    found += [("alias of", entry.alias_of)] if entry.alias_of else []
    found += [(MARKS[mark], str(value)) for mark, value in entry.marks.items() if mark in MARKS]
    if options_key is not None:
        for name, value in entry.options.items():
            takes = entry.takes.get(name)
            is_limited = get_origin(takes) is Literal or any(bounds_of(takes))
            found.append((f"{options_key}.{name}", default(value) + (f" ({words(takes)})" if is_limited else "")))
    found.append(("elsewhere", elsewhere(entry)))
    return [(title, text) for title, text in found if text]


def elsewhere(entry: Entry) -> str:
    """Returns the function's name in other frameworks, or the meaning of its name in them; "" if nothing is known."""
    if entry.kind == WRAPPERS.kind:
        return f"wrap_method={entry.name} of a fork of verl, without its faults (`whet algorithms show cpo`)"
    known = _texts()["elsewhere"].get(entry.kind, {})
    return known.get(entry.name) or known.get(entry.alias_of or "", "")


def notation(kind: str) -> str:
    """Returns the symbols that formulas of a kind use; "" for a kind without formulas."""
    return _texts()["notation"].get(kind, "")


@cache
def _texts() -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = shipped_yaml("algorithms/names.yaml")
    return found


def legend() -> Mapping[str, str]:
    """Returns the names of a certificate's columns with their meaning."""
    return _texts()["certificate"]


MARKS = {"aggregation": "fixes aggregation", "corrects": "corrects"}


def default(value: object) -> str:
    """Formats the default of an option."""
    return "required" if value is REQUIRED else str(value) or "''"


def summary(entry: Entry) -> str:
    """Returns the first line of the docstring; for an alias, the original's name and the preset options."""
    if entry.alias_of is None:
        return entry.summary
    original = next(kind for kind in KINDS if kind.kind == entry.kind)[entry.alias_of]
    presets = {name: value for name, value in entry.options.items() if original.options[name] != value}
    listed = ", ".join(f"{name}={default(value)}" for name, value in presets.items())
    return f"{entry.alias_of}{f' with {listed}' if presets else ''}"
