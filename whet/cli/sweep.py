# SPDX-License-Identifier: Apache-2.0
"""Sweeps: `whet train RECIPE -m key=1,2` starts a run for each combination of values, one after the other.

Each run is a process of its own in a folder of its own, named by its values: a crash ends only that run, and the same
command later goes on with those that are not finished."""

from __future__ import annotations

import hashlib
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer

from whet.cli.runs import runs_table
from whet.errors import ConfigError

if TYPE_CHECKING:
    from whet.config.schema import RunConfig
    from whet.tracking.runs import RunFolder

MAX_NAME = 100  # characters of a folder's name


@dataclass(frozen=True)
class Member:
    """A run of a sweep: its values by key, and its overrides."""

    values: Mapping[str, str]
    overrides: list[str]
    name: str  # of its folder


def members(words: Sequence[str]) -> list[Member]:
    """The runs that overrides with sweeps stand for (`a=1,2`, `a=range(1,4)`, `a=choice(x,y)`); the last sweep changes
    fastest.  Raises: ConfigError."""
    from hydra.errors import HydraException

    from whet.config.compose import parse_override

    fixed, swept = [], dict[str, list[str]]()
    for word in words:
        override = parse_override(word)
        if not override.is_sweep_override():
            fixed.append(word)
            continue
        try:
            swept[override.key_or_group] = list(override.sweep_string_iterator())
        except HydraException as error:  # interval, glob
            found, forms = "it does not list its values", "key=1,2, key=range(1,4) or key=choice(a,b)"
            raise ConfigError(word, found, forms, "list them") from error
    if not swept or "trainer.run_dir" in swept:
        found = "trainer.run_dir with several values" if swept else "no key with several values"
        raise ConfigError("-m", found, "a sweep of other keys, such as actor.optim.lr=1e-5,2e-5", "name one")
    made = []
    for chosen in product(*swept.values()):
        values = dict(zip(swept, chosen, strict=True))
        made.append(Member(values, [*fixed, *(f"{key}={value}" for key, value in values.items())], _name(values)))
    return made


def sweep(schema: type[RunConfig], recipe: str | None, words: Sequence[str], *, dry_run: bool = False) -> None:
    """Starts the runs of a sweep that are not finished, and prints a table of all of them. The exit status is 0 if all
    are finished, 1 if not, 130 after Ctrl-C.

    Raises: ConfigError, before the first run starts, for a mistake in any, and for one begun with other settings."""
    from whet.config import load_config
    from whet.tracking.console import shared_console
    from whet.tracking.runs import is_run
    from whet.trainers.frame import run_folder
    from whet.trainers.run_dir import is_begun

    found = members(words)
    configs = [load_config(schema, recipe, member.overrides).config for member in found]
    root = run_folder(configs[0].trainer)
    console, asked = shared_console(), list[int]()
    for member, config in zip(found, configs, strict=True):
        if not dry_run and config.trainer.resume == "auto" and is_run(root / member.name):
            is_begun(root / member.name, config, {})
    for number, (member, config) in enumerate(zip(found, configs, strict=True), start=1):
        folder = root / member.name
        settings = " ".join(f"{key}={value}" for key, value in member.values.items())
        is_kept = not dry_run and config.trainer.resume != "overwrite"
        if is_kept and _is_done(folder, config.trainer.total_steps):
            console.print(f"run {number} of {len(found)} is finished already: {folder}", markup=False, soft_wrap=True)
            continue
        console.rule(f"run {number} of {len(found)}: {settings}")
        quoted = str(folder).replace('"', r"\"")
        given = [*([recipe] if recipe else []), *member.overrides, f'trainer.run_dir="{quoted}"']
        _run([sys.executable, "-m", "whet", schema.command, *given, *(["--dry-run"] if dry_run else [])], asked)
        if asked:
            break
    if dry_run:
        return
    read = [_read(root / member.name) for member in found]
    console.rule(f"{root}: {len(found)} runs")
    console.print(runs_table(read, [_short_keys(member.values) for member in found]))
    for run in read:
        if run.error:
            console.print(f"{run.path}: {run.error}", markup=False, soft_wrap=True)
    if any(run.state != "finished" for run in read):
        typer.echo("the same command goes on with the runs that are not finished")
        raise typer.Exit(128 + asked[0] if asked else 1)


def _run(command: list[str], asked: list[int]) -> None:
    """Runs a process to its end. A signal meanwhile is noted in `asked`; the run saves and ends after its step."""
    process = subprocess.Popen(command)

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if number != signal.SIGINT:  # the terminal sends Ctrl-C to both
            process.send_signal(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_done(folder: Path, total_steps: int | None) -> bool:
    """Tells whether a run is finished, and no more steps are asked for than it has done."""
    run = _read(folder)
    return run.state == "finished" and (total_steps is None or run.step >= total_steps)


def _read(folder: Path) -> RunFolder:
    """A run of the sweep, also if it has no folder yet."""
    from whet.tracking.runs import RunFolder, is_run, read_run

    return read_run(folder) if is_run(folder) else RunFolder(folder, {}, "not begun", None, "", [])


def _name(values: Mapping[str, str]) -> str:
    """A folder's name from the values, such as lr-1e-05_seed-1; unlike `=` and `,` its characters mean nothing to Hydra
    or a shell. A digest stands for what it leaves out."""
    whole = "_".join(f"{key}-{value}" for key, value in _short_keys(values).items())
    plain = re.sub(r"[^\w.+-]", "-", whole)
    if plain == whole and len(whole) <= MAX_NAME:
        return whole
    return f"{plain[:MAX_NAME]}_{hashlib.sha256(whole.encode()).hexdigest()[:6]}"


def _short_keys(values: Mapping[str, str]) -> Mapping[str, str]:
    """The values by the last names of their keys, if these differ."""
    short = {key.rpartition(".")[2]: value for key, value in values.items()}
    return short if len(short) == len(values) else values
