# SPDX-License-Identifier: Apache-2.0
"""The command `whet plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from whet.cli.arguments import ConfigName, DeviceMemory, HostMemory, RecipeAndOverrides, split_recipe
from whet.cli.inputs import For, run_config_of
from whet.cli.tables import table
from whet.config import problems
from whet.config.schema import RunConfig
from whet.errors import ConfigError
from whet.planning.units import size
from whet.plugins.planner.first import CARDS, accuracy, first_answer, shape_of
from whet.plugins.planner.scale import places, scale, smallest
from whet.registry import register_command


@register_command("plan")
def plan(
    words: RecipeAndOverrides = None,
    config_name: ConfigName = None,
    command: For = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the numbers as JSON")] = False,
    gpus: Annotated[str | None, typer.Option(help="plan for other numbers of accelerators: 8,16,64")] = None,
    ranks: Annotated[bool, typer.Option("--ranks", help="list the node, devices and mesh place of every rank")] = False,
) -> None:
    """Estimate the memory, disk and time that a run needs.

    A first answer comes from formulas, the plan from tracing the passes of the model.

    The exit status is 1 if the run does not fit."""
    config = run_config_of(command, *split_recipe(words, config_name))
    if as_json + ranks + (gpus is not None) > 1:
        found = " ".join(["--json"] * as_json + ["--ranks"] * ranks + [f"--gpus {gpus}"] * (gpus is not None))
        raise ConfigError("arguments", found, "one of --json, --ranks and --gpus", "run the command for each")
    if ranks:
        list_ranks(config)
        return
    if gpus is not None:
        plan_for(config, gpus, device_memory, host_memory)
        return

    for line in [] if as_json else first_answer(config, device_memory, host_memory):
        typer.echo(line)

    from whet.plugins.planner.forecast import forecast_of
    from whet.plugins.planner.plan_page import numbers, show
    from whet.tracking.console import long_phase

    with long_phase("planning"):
        made, refused = forecast_of(config, device_memory, host_memory), [str(each) for each in problems(config)]
    if as_json:
        typer.echo(numbers(made))
    else:
        show(made, refused)
    if not (made.fits and made.fits_on_disk):
        raise typer.Exit(1)


def plan_for(config: RunConfig, gpus: str, device_gib: float | None, host_gib: float | None) -> None:
    """Prints a plan for each number of accelerators, and the smallest number. Exits with 1 if none fits."""
    from whet.tracking.console import shared_console

    counts = [int(each) if each.strip().isdecimal() else 0 for each in gpus.split(",")]
    if min(counts) < 1:
        raise ConfigError("--gpus", gpus, "numbers of accelerators, such as 8,16,64")
    if device_gib is None:
        raise ConfigError("--device-memory", None, f"GiB of an accelerator, such as {CARDS[80]}", "add it to --gpus")
    shape = shape_of(str(config.model.path))
    if shape is None:
        raise ConfigError("model.path", config.model.path, "a folder with the config.json of the model")
    found = scale(config, shape, counts, device_gib, host_gib)
    rows = [
        (str(each.gpus), "yes" if each.fits else "no", size(each.needed), size(each.offloaded), each.mesh, each.pools)
        for each in found
    ]
    columns = ["GPUs", "fits", "on each", "offloaded to a node", "mesh of the actor", "processes x devices"]
    shared_console().print(table(columns, rows, left=(4, 5)))
    least = smallest(config, shape, device_gib, max(counts), host_gib)
    if least is None:
        typer.echo(f"the run fits on no number of accelerators up to {max(counts)}")
        raise typer.Exit(1)
    typer.echo(f"smallest number that fits: {least.gpus}, with {least.words or 'the config as it is'}")
    typer.echo(
        f"by formulas, {accuracy(config)}; `whet plan` with these settings traces the passes, --ranks lists ranks"
    )


def list_ranks(config: RunConfig) -> None:
    """Prints the node, devices and mesh place of every rank."""
    for each in places(config):
        numbers = ", ".join(map(str, each.devices))
        devices = f"device{'s' * (len(each.devices) > 1)} {numbers}" if each.devices else "processors"
        devices = f"{devices} ({each.share:g} of it)" if each.devices and each.share < 1 else devices
        at = "".join(f", {name} {place}" for name, place in each.at.items())
        typer.echo(f"{each.pool} rank {each.rank}: node {each.node}, {devices}: {', '.join(each.roles)}{at}")
