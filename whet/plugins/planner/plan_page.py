# SPDX-License-Identifier: Apache-2.0
"""The output of `whet plan`: tables and lines, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from whet.config.schema import KV_CACHE_BYTES
from whet.planning.units import duration, size
from whet.plugins.planner.fit import advice
from whet.plugins.planner.forecast import Forecast, data_line, model_lines
from whet.plugins.planner.memory import Memory
from whet.plugins.planner.speed import EFFICIENCY

MEMORY_NOTE = "Memory: the peak of all tensors in each phase, plus that of the process itself."
TIME_NOTE = (
    f"Times are accurate to a factor of two; they assume {EFFICIENCY:.0%} of the matrix multiplication speed measured "
    "just now. Rewards are not included; validation only in the total time."
)


def numbers(made: Forecast) -> str:
    """Returns the forecast as a JSON object, in bytes and seconds."""
    return json.dumps(
        {
            "parameters": {role: count for plan in made.plans.values() for role, count in plan.weights.items()},
            "pools": {name: _plan(plan) for name, plan in made.plans.items()},
            "rooms": [
                {"name": room.name, "needed_bytes": room.needed, "free_bytes": room.free, "fits": room.fits}
                for room in made.rooms
            ],
            "fits": made.fits,
            "changes": [asdict(change) for change in made.changes],
            "kv_cache_bytes": made.cache_bytes,
            "checkpoint_bytes": made.checkpoint_bytes,
            "checkpoints_bytes": made.disk_bytes,
            "free_disk_bytes": made.free_disk_bytes,
            "tokens_per_step": made.speed.tokens,
            "seconds_per_step": made.estimated_seconds,
            "measured_seconds_per_step": made.measured,
            "seconds": made.seconds,
            "notes": made.notes,
        },
        indent=1,
    )


def _plan(plan: Memory) -> dict[str, object]:
    return {
        "memory": {item.name: item.by_phase for item in plan.items if not item.on_device},
        "device_memory": {item.name: item.by_phase for item in plan.items if item.on_device},
        "phases": {phase: plan.total(phase) + plan.total(phase, on_device=True) for phase in plan.phases},
        "tensor_bytes": plan.tensor_bytes,
        "resident_bytes": plan.resident_bytes,
        "device_bytes": plan.device_bytes,
    }


def show(made: Forecast, refused: Sequence[str]) -> None:
    """Prints the forecast: tables on a terminal, plain lines elsewhere."""
    console = Console(highlight=False, soft_wrap=True)
    pools = made.setup.config.cluster.pools
    for line in model_lines(made.setup):
        console.print(line)
    if made.counts is not None and made.seconds is not None:
        console.print(data_line(made.setup, made.counts))
        console.print(f"total time: about {duration(made.seconds)}", style="bold")
    for name, plan in made.plans.items():
        for role in plan.weights:
            tokens = plan.micro_batch_tokens.get(role)
            extra = "" if tokens is None else f", micro-batches of up to {tokens:,} tokens"
            console.print(f"{role}: {made.setup.roles[role].model_path}{extra}")
        of_pool = f" of the {pools[name].processes} in pool {name}" if len(pools) > 1 else ""
        for on_device, place in ((True, "accelerator"), (False, "host")):
            if any(item.on_device == on_device for item in plan.items):
                console.print(_memory_table(plan, f"{place} memory of one process{of_pool}", on_device))
    _show_fit(console, made)
    _show_speed(console, made)
    for note in (*made.notes, MEMORY_NOTE, *([] if made.estimated_seconds is None else [TIME_NOTE])):
        console.print(Text(note, style="dim"))
    if refused:
        console.print(Text(f"\n`whet {made.setup.config.command}` would refuse this config:", style="yellow"))
        for each in refused:
            console.print(Text(f"- {each}"))


def _memory_table(memory: Memory, title: str, on_device: bool) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for phase in memory.phases:
        table.add_column(phase, justify="right")
    for item in (each for each in memory.items if each.on_device == on_device):
        table.add_row(item.name, *(size(item.by_phase[p]) if p in item.by_phase else "" for p in memory.phases))
    totals = (size(memory.total(phase, on_device=on_device)) for phase in memory.phases)
    table.add_row("all tensors", *totals, style="bold")
    if memory.untouched_bytes and not on_device:
        untouched = size(memory.untouched_bytes)
        table.add_row("reserved but never written", *(untouched for _ in memory.phases), style="dim")
    return table


def _show_fit(console: Console, made: Forecast) -> None:
    for room in made.rooms:
        each = f" in {room.processes} processes" if room.processes > 1 else ""
        needed = f"memory: about {size(room.needed)}{each}{'' if room.on_device else ', in addition to the imports'}"
        if room.free in (None, sys.maxsize):
            console.print(f"{needed}; this system does not report how much is free")
        else:
            fits = "it fits" if room.fits else "it does not fit"
            text = f"{needed}, and {room.name} has {size(room.free or 0)} free: {fits}"
            console.print(Text(text, style="green" if room.fits else "red"))
    if made.cache_bytes is not None:
        console.print(f"kv_cache_bytes=auto: {size(made.cache_bytes)}; the plan counts {size(KV_CACHE_BYTES)}")
    if not made.fits:
        console.print("settings that reduce it, largest saving first:")
        for line in advice(list(made.changes), max(made.rooms, key=lambda room: room.used).free or 0):
            console.print(line)
    limit = made.setup.config.trainer.save_limit
    fits = "" if made.fits_on_disk else ": lower trainer.save_limit, or choose another trainer.run_dir"
    kept = "all are kept" if limit is None else f"{size(made.disk_bytes)} for {limit} kept and the next one"
    free = "" if made.free_disk_bytes is None else f"; {made.run_dir} has {size(made.free_disk_bytes)} free"
    line = f"disk: {size(made.checkpoint_bytes)} a checkpoint, {kept}{free}{fits}"
    console.print(Text(line, style="red" if fits else "green"))


def _show_speed(console: Console, made: Forecast) -> None:
    tokens, seconds = made.speed.tokens, made.estimated_seconds
    parts = ", ".join(f"{name} {count:,}" for name, count in tokens.items())
    console.print(f"tokens per step: {sum(tokens.values()):,} ({parts})")
    if seconds is None:
        console.print("estimated time per step: unknown, the speed of accelerators is not measured")
    else:
        phases = ", ".join(f"{name} {duration(each)}" for name, each in seconds.items())
        console.print(f"estimated time per step: {duration(sum(seconds.values()))} ({phases})")
    if "time/step" in made.measured:
        measured = {name.removeprefix("time/"): each for name, each in made.measured.items()}
        step = measured.pop("step")
        phases = ", ".join(f"{name} {duration(each)}" for name, each in measured.items())
        console.print(f"measured time per step in {made.run_dir}: {duration(step)} ({phases})")
