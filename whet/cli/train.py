# SPDX-License-Identifier: Apache-2.0
"""The commands of trainers (`whet train`, `whet sft`, ...) and `whet quickstart`."""

from __future__ import annotations

import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whet.cli.arguments import ConfigName, DeviceMemory, HostMemory, RecipeAndOverrides, program, split_recipe
from whet.cli.runs import show_end
from whet.cli.sweep import sweep
from whet.registry import Entry

if TYPE_CHECKING:
    from whet.config.schema import RunConfig


Multirun = Annotated[bool, typer.Option("--multirun", "-m", help="run each combination of values: trainer.seed=1,2")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="check everything, load one batch, stop")]


def command_of(trainer: Entry) -> Callable[..., None]:
    """The command of a trainer, with the options that it offers."""

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
            raise typer.BadParameter("--device-memory and --host-memory are of a machine elsewhere: add --dry-run")
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
    """Shows the run. After a signal, prints what was saved and the command that resumes, then exits with the status
    that shells expect: 130 after Ctrl-C."""
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
    """Shows the progress of long phases, and at the end the table of the run."""
    from whet.tracking.long_phases import LongPhases
    from whet.tracking.runs import read_run
    from whet.trainers.frame import run_folder

    with LongPhases().watch():
        yield
    if writes:
        show_end(read_run(run_folder(config.trainer)))


def quickstart(
    run_dir: Annotated[
        Path | None, typer.Option(help="the folder to write; unset: runs/ and the recipe's name")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="random seed")] = 0,
    images: Annotated[bool, typer.Option("--images", help="a model that sees learns to count figures")] = False,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="SmolLM2-135M learns sums and last words")] = False,
) -> None:
    """Train a small model to add, to count, or a real one."""
    from whet.tracking.long_phases import LongPhases
    from whet.trainers.quickstart import ADDITION, quickstart as run
    from whet.trainers.quickstart_images import COUNTING
    from whet.trainers.quickstart_pretrained import PRETRAINED

    if images and pretrained:
        raise typer.BadParameter("--images and --pretrained are two quickstarts; choose one")
    lesson = COUNTING if images else PRETRAINED if pretrained else ADDITION
    with LongPhases().watch():
        run(run_dir or Path("runs", lesson.recipe), seed, program(), lesson)
