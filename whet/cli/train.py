# SPDX-License-Identifier: Apache-2.0
"""The commands of trainers (`whet train`, `whet sft`, ...).

A sweep, `whet train RECIPE -m key=1,2`, starts a run for each combination of values, one after the other. Each run has
its own process and its own folder, named by its values: a crash ends only that run, and the same command later
continues the unfinished runs."""

from __future__ import annotations

import hashlib
import inspect
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whet.cli.arguments import ConfigName, DeviceMemory, HostMemory, RecipeAndOverrides, program, split_recipe
from whet.cli.runs import path_override, runs_table, show_end
from whet.errors import ConfigError
from whet.registry import Entry

if TYPE_CHECKING:
    from whet.config.schema import RunConfig
    from whet.tracking.runs import RunFolder

MAX_NAME = 100  # characters of a folder's name
Multirun = Annotated[bool, typer.Option("--multirun", "-m", help="run each combination of values: trainer.seed=1,2")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="check everything, load one batch, stop")]


def command_of(trainer: Entry) -> Callable[..., None]:
    """Builds the command of a trainer, with its options."""

    def command(
        words: RecipeAndOverrides = None,
        config_name: ConfigName = None,
        dry_run: DryRun = False,
        multirun: Multirun = False,
        device_memory: DeviceMemory = None,
        host_memory: HostMemory = None,
    ) -> None:
        from whet.config import load_config
        from whet.config.commands import schema_of

        is_elsewhere = device_memory is not None or host_memory is not None
        if is_elsewhere and (multirun or not dry_run):
            raise typer.BadParameter("--device-memory and --host-memory describe another machine: add --dry-run")
        schema: Any = schema_of(trainer.name)
        if multirun:
            sweep(schema, *split_recipe(words, config_name), dry_run=dry_run)
            return
        config = load_config(schema, *split_recipe(words, config_name)).config
        if is_elsewhere:
            with shown(config, writes=False):
                trainer.marked("elsewhere")(config, device_memory, host_memory)
            return
        with _as_command(config, writes=not dry_run):
            trainer.load()(config, **({"dry_run": True} if dry_run else {}))  # loaded here, since this loads torch

    left_out = {"dry_run"} - trainer.options.keys()
    if "elsewhere" not in trainer.marks:
        left_out |= {"device_memory", "host_memory"}
    whole = inspect.signature(command, eval_str=True)
    offered = [each for name, each in whole.parameters.items() if name not in left_out]
    vars(command)["__signature__"] = whole.replace(parameters=offered)
    command.__name__, command.__doc__ = trainer.name, trainer.marks.get("summary", trainer.summary)
    return command


@contextmanager
def _as_command(config: RunConfig, *, writes: bool = True) -> Iterator[None]:
    """Shows the progress of a run. After a signal, prints the last checkpoint and the command that resumes, then exits
    with the usual status: 130 after Ctrl-C."""
    from whet.trainers.stop import Stopped

    try:
        with shown(config, writes=writes):
            yield
    except Stopped as stopped:
        words = [re.sub("^trainer.resume=(never|overwrite)$", "trainer.resume=auto", word) for word in sys.argv[1:]]
        typer.echo(f"{stopped}:\n  {program()} {shlex.join(words)}", err=True)
        raise typer.Exit(128 + stopped.number if stopped.number is not None else 0) from stopped


@contextmanager
def shown(config: RunConfig, *, writes: bool = True) -> Iterator[None]:
    """Shows the progress of long phases, and after the run its table of results."""
    from whet.tracking.console import LongPhases
    from whet.tracking.runs import read_run
    from whet.trainers.frame import run_folder

    with LongPhases().watch():
        yield
    if writes:
        show_end(read_run(run_folder(config.trainer)))


@dataclass(frozen=True)
class Member:
    """A run of a sweep: its values of the swept keys, all of its overrides, and the name of its folder."""

    values: Mapping[str, str]
    overrides: list[str]
    name: str  # of its folder


def members(words: Sequence[str]) -> list[Member]:
    """Lists the runs of a sweep in overrides (`a=1,2`, `a=range(1,4)`, `a=choice(x,y)`); the last key varies fastest.
    Raises: ConfigError."""
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
            found, forms = "does not list its values", "key=1,2, key=range(1,4) or key=choice(a,b)"
            raise ConfigError(word, found, forms, "list them") from error
    if not swept or "trainer.run_dir" in swept:
        found = "trainer.run_dir with several values" if swept else "no key with several values"
        raise ConfigError("-m", found, "several values of another key, such as actor.optim.lr=1e-5,2e-5", "add them")
    made = []
    for chosen in product(*swept.values()):
        values = dict(zip(swept, chosen, strict=True))
        made.append(Member(values, [*fixed, *(f"{key}={value}" for key, value in values.items())], _name(values)))
    return made


def sweep(schema: type[RunConfig], recipe: str | None, words: Sequence[str], *, dry_run: bool = False) -> None:
    """Starts the unfinished runs of a sweep, and prints a table of all its runs. The exit status is 0 if all are
    finished, 1 if not, 130 after Ctrl-C.

    Raises: ConfigError, before any run starts, for a mistake in a run's config, or if a run was begun with other
    settings."""
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
        given = [*([recipe] if recipe else []), *member.overrides, path_override("trainer.run_dir", folder)]
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
        typer.echo("the same command continues the runs that are not finished")
        raise typer.Exit(128 + asked[0] if asked else 1)


def _run(command: list[str], asked: list[int]) -> None:
    """Runs a process to its end. Signals are recorded in `asked`, and passed to the process, which saves and ends."""
    process = subprocess.Popen(command)

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if number != signal.SIGINT:  # the terminal sends Ctrl-C to both processes
            process.send_signal(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_done(folder: Path, total_steps: int | None) -> bool:
    """Tells whether a run is finished and has done at least `total_steps`."""
    run = _read(folder)
    return run.state == "finished" and (total_steps is None or run.step >= total_steps)


def _read(folder: Path) -> RunFolder:
    """Reads a run of the sweep, even if it has no folder yet."""
    from whet.tracking.runs import RunFolder, is_run, read_run

    return read_run(folder) if is_run(folder) else RunFolder(folder, {}, "not begun", None, "", [])


def _name(values: Mapping[str, str]) -> str:
    """Builds a folder's name from the values, such as lr-1e-05_seed-1. It has no `=` or `,`, which Hydra and the shell
    would interpret. If characters are replaced or cut off, a digest of the whole name is added."""
    whole = "_".join(f"{key}-{value}" for key, value in _short_keys(values).items())
    plain = re.sub(r"[^\w.+-]", "-", whole)
    if plain == whole and len(whole) <= MAX_NAME:
        return whole
    return f"{plain[:MAX_NAME]}_{hashlib.sha256(whole.encode()).hexdigest()[:6]}"


def _short_keys(values: Mapping[str, str]) -> Mapping[str, str]:
    """Shortens the keys to their parts after the last dot, if these parts differ."""
    short = {key.rpartition(".")[2]: value for key, value in values.items()}
    return short if len(short) == len(values) else values
