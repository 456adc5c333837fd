# SPDX-License-Identifier: Apache-2.0
"""`whet train`, `whet sft`, `whet train-reward` and `whet quickstart`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whet.cli.arguments import ConfigName, DeviceMemory, HostMemory, RecipeAndOverrides, program, split_recipe
from whet.cli.runs import show_end
from whet.cli.sweep import sweep

if TYPE_CHECKING:
    from whet.config.schema import RunConfig


Multirun = Annotated[bool, typer.Option("--multirun", "-m", help="run each combination of values: trainer.seed=1,2")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="check everything, load one batch, stop")]


def train(
    words: RecipeAndOverrides = None,
    config_name: ConfigName = None,
    dry_run: DryRun = False,
    multirun: Multirun = False,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
) -> None:
    """Train a model with reinforcement learning (PPO, GRPO, ...)."""
    is_elsewhere = device_memory is not None or host_memory is not None
    if is_elsewhere and (multirun or not dry_run):
        raise typer.BadParameter("--device-memory and --host-memory state a machine that is not here: add --dry-run")
    if (config := _config("train", words, config_name, dry_run, multirun)) is None:
        return
    if is_elsewhere:
        from whet.trainers.dry_run import dry_run_elsewhere

        with shown(config, writes=False):
            dry_run_elsewhere(config, device_memory, host_memory)
    else:
        from whet.trainers.build import train as run  # after the config is checked, since this loads torch

        with _as_command(config, writes=not dry_run):
            run(config, dry_run=dry_run)


def sft(
    words: RecipeAndOverrides = None,
    config_name: ConfigName = None,
    dry_run: DryRun = False,
    multirun: Multirun = False,
) -> None:
    """Train a model on examples (supervised fine-tuning)."""
    if (config := _config("sft", words, config_name, dry_run, multirun)) is not None:
        from whet.trainers.sft import train_sft

        with _as_command(config, writes=not dry_run):
            train_sft(config, dry_run=dry_run)


def train_reward(
    words: RecipeAndOverrides = None,
    config_name: ConfigName = None,
    dry_run: DryRun = False,
    multirun: Multirun = False,
) -> None:
    """Train a reward model on preference pairs (Bradley-Terry)."""
    if (config := _config("train-reward", words, config_name, dry_run, multirun)) is not None:
        from whet.trainers.train_reward import train_reward as run

        with _as_command(config, writes=not dry_run):
            run(config, dry_run=dry_run)


def _config(command: str, words: list[str] | None, config_name: str | None, dry_run: bool, multirun: bool) -> Any:
    """The config of a command; None after a sweep, which it starts."""
    from whet.config import load_config
    from whet.config.schema import COMMANDS

    schema: Any = COMMANDS[command]
    if multirun:
        sweep(schema, *split_recipe(words, config_name), dry_run=dry_run)
        return None
    return load_config(schema, *split_recipe(words, config_name)).config


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
