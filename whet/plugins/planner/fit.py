# SPDX-License-Identifier: Apache-2.0
"""Checks whether a run fits into memory and onto the disk, and finds settings that reduce its needs."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from whet.devices import bfloat16_instructions
from whet.errors import ConfigError, ModelError
from whet.models.caches import attention_heads
from whet.phases import counting, phase
from whet.planning import machine
from whet.planning.machine import ANYWAY, free_accelerator, free_memory
from whet.planning.planner import Setup
from whet.planning.units import size
from whet.plugins.planner import memory as estimate
from whet.plugins.planner.first import changed, section_of
from whet.plugins.planner.memory import Memory, device_of, outlines_of
from whet.plugins.planner.outline import FLOAT32, inner_size
from whet.registry import ENGINES

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Room:
    """The memory of the host or of an accelerator: bytes that a run needs, and bytes that are free (None: unknown)."""

    name: str
    needed: int
    tensors: int  # bytes of tensors alone, without the estimate for process and allocator
    free: int | None
    memory: Memory  # the plan of the process that needs most of it
    on_device: bool = False
    processes: int = 1  # number of processes that share it

    @property
    def fits(self) -> bool:
        """Tells whether the run fits, as far as known."""
        return self.free is None or self.needed <= self.free

    @property
    def used(self) -> float:
        """The needed bytes as a fraction of the free bytes."""
        return 0.0 if self.free is None else self.needed / max(1, self.free)


@dataclass(frozen=True)
class Change:
    """A setting that reduces memory: the bytes that the run needs with it, and the bytes that it saves."""

    override: str  # in command line syntax
    needed_bytes: int
    saved_bytes: int


def rooms(setup: Setup) -> list[Room]:
    """Returns the memory of the host (for all processes on a node) and of each pool's accelerators: needed and free.

    Raises: ModelError."""
    cluster, free = setup.config.cluster, setup.host or free_memory()
    plans = {name: estimate.plan_memory(setup, name) for name in cluster.pools}
    nodes = defaultdict[int, list[estimate.Memory]](list)
    for slot in cluster.slots():
        nodes[slot.node].append(plans[slot.pool.name])
    fullest = max(nodes.values(), key=lambda node: sum(plan.resident_bytes for plan in node))
    host = Room(
        "memory" if free is None else free.bound,
        sum(plan.resident_bytes for plan in fullest),
        sum(plan.touched_bytes for plan in fullest),
        None if free is None else free.bytes,
        max(fullest, key=lambda plan: plan.resident_bytes),
        processes=len(fullest),
    )
    of = {name: f" of the pool {name}" if cluster.placement else "" for name in plans}
    return [host] + [
        Room(f"{device.bound}{of[name]}", plan.device_bytes, plan.device_tensor_bytes, device.bytes, plan, True)
        for name, plan in plans.items()
        if (device := device_of(setup, name)) is not None
    ]


def check_fits(setup: Setup, run_dir: Path, replan: Callable[[Any], Setup], reclaimed_bytes: int = 0) -> int:
    """Checks that a run fits into memory and onto the disk, before its models are loaded.  Returns the bytes of a
    checkpoint, or 0 if unknown.

    `reclaimed_bytes` of the disk become free when the run starts. No plan is made if a fast upper bound is below half
    the memory.  Raises: ConfigError with the numbers, the settings that reduce them, and the way to start anyway."""
    if os.environ.get(ANYWAY, "0") not in ("", "0"):
        return 0
    free, cluster = setup.host or free_memory(), setup.config.cluster
    setup = replace(setup, device=setup.device or free_accelerator(cluster))
    try:
        needed = sum(outlines_of(setup)[name].checkpoint_bytes for name in setup.objectives)
        bound = upper_bound(setup)
        is_large = free is not None and bound * cluster.devices_here > free.bytes / 2
        share = min(pool.share for pool in cluster.pools.values())
        if is_large or (setup.device is not None and bound > share * setup.device.bytes / 2):
            found = rooms(setup)
            room = max(found, key=lambda each: each.used)
            if room.free is not None and room.tensors > room.free:
                raise _too_much_memory(setup, room, replan)
            if room.free is not None and room.needed > 0.8 * room.free:
                log.warning(
                    "this run needs about %s of memory, and %s has %s free; `whet plan` shows the parts",
                    *(size(room.needed), room.name, size(room.free)),
                )
    except ModelError as error:  # loading the model will raise it again
        log.debug("no estimate: %s", error)
        return 0
    if setup.host is None:
        machine.check_disk(needed, run_dir, reclaimed_bytes)
        free_bytes, limit = machine.free_disk(run_dir) + reclaimed_bytes, setup.config.trainer.save_limit
        if limit is not None and needed * (limit + 1) > free_bytes:  # a new one is written before the oldest is deleted
            log.warning(
                "%d checkpoints and the next one need about %s, but %s has %s free; lower trainer.save_limit",
                *(limit, size(needed * (limit + 1)), run_dir, size(free_bytes)),
            )
    return needed


def upper_bound(setup: Setup) -> int:
    """Returns an upper bound on the bytes of one process, from formulas, without tracing the passes."""
    config, total = setup.config, 0
    for name, model in outlines_of(setup).items():
        total += model.weight_bytes * (4 if name in setup.objectives else 1)
        shape = model.config
        ranks = estimate.spread_of(setup, name).row_ranks
        rows = estimate.mini_batch(config, name, setup.lengths, ranks) if name in setup.objectives else []
        longest = max((row.tokens for row in rows), default=0)
        allowed = max(estimate.micro_batch_tokens(setup, name), longest)
        tokens = min(allowed, sum(row.tokens for row in rows))
        states = 30 * shape.hidden_size + 10 * inner_size(shape) + 3 * attention_heads(shape) * longest
        total += 2 * FLOAT32 * tokens * shape.num_hidden_layers * states
        chunk = min(setup.roles[name].forward.chunk_tokens, tokens)
        total += shape.vocab_size * (24 * chunk + 3 * FLOAT32 * shape.hidden_size)
    if config.trains_on == "prompts":
        model = outlines_of(setup)["actor"]
        planned = estimate.rollout_bytes(config, model.config, setup.lengths)
        cache = planned.written if setup.device is None else planned.cache
        total += model.weight_bytes + cache + estimate.sampling_bytes(config, model.config, planned)
    return total


def changes(setup: Setup, room: Room, replan: Callable[[Any], Setup]) -> list[Change]:
    """Returns settings that save at least 2 % of the bytes needed in `room`, the largest saving first; then a
    combination of settings that each add to the saving. Each saving comes from a new plan with the setting."""
    candidates = _candidates(setup, room)

    def planned(*overrides: str) -> Change:
        values = {key: value for each in overrides for key, value in candidates[each].items()}
        other = replace(replan(changed(setup.config, values)), device=setup.device, host=setup.host)
        needed = next(each for each in rooms(other) if each.name == room.name).needed
        return Change(" ".join(overrides), needed, room.needed - needed)

    with phase("settings that reduce memory"):
        found = [planned(each) for each in counting(candidates)]
    worth = [each for each in found if each.saved_bytes > room.needed / 50]
    worth.sort(key=lambda each: -each.saved_bytes)
    together = worth[:1]
    with phase("combinations of settings"):
        for each in counting(worth[1:]):
            more = planned(*together[0].override.split(), each.override)
            together = [more] if more.saved_bytes > together[0].saved_bytes else together
    return worth if together == worth[:1] else [*worth, *together]


def _candidates(setup: Setup, room: Room) -> dict[str, dict[str, object]]:
    """Returns settings that may reduce memory: the keys and values of each override of the command line."""
    config, model, sizes = setup.config, setup.config.model, room.memory.micro_batch_tokens
    found: list[tuple[bool, str, object]] = [
        (not model.gradient_checkpointing, "model.gradient_checkpointing", True),
        (model.lora.rank is None and not model.freeze, "model.lora.rank", 16),
    ]
    for name in setup.roles:
        section = name.partition(":")[0]
        _, prefix = section_of(config, "ref" if section == "teacher" else section)  # teachers use the engine of ref
        whole = estimate.spread_of(setup, name).shards == 1 and config.cluster.processes_of(name) > 1
        found += [
            (whole and _shards(setup, name, engine) > 1, f"{prefix}engine.name", engine) for engine in ENGINES.names()
        ]
    for name in setup.objectives:
        role, prefix = section_of(config, name)
        allowed = max(row.tokens for row in estimate.mini_batch(config, name, setup.lengths))
        if config.trains_on == "prompts":
            allowed = max(allowed, config.data.max_prompt_length + config.data.max_response_length)
        tokens, optim = sizes.get(name, 0), role.optim
        found += [
            (tokens > allowed, f"{prefix}max_tokens_per_micro_batch", max(allowed, tokens // 2)),
            (role.engine.logits_chunk_tokens > 128, f"{prefix}engine.logits_chunk_tokens", 128),
            ((optim.name, optim.state_dtype) == ("adamw", "float32"), f"{prefix}optim.state_dtype", "bfloat16"),
        ]
    if config.trains_on == "prompts":
        rows = config.rollout.max_batch_size
        planned = estimate.rollout_bytes(config, outlines_of(setup)["actor"].config, setup.lengths)
        found += [
            (room.on_device and not config.rollout.free_cache_engine, "rollout.free_cache_engine", True),
            (rows > 16, "rollout.max_batch_size", max(16, rows // 4)),
            *((True, f"rollout.engine.options.{name}", value) for name, value in planned.smaller.items()),
        ]
    narrow: dict[str, object] = {f"{each}.dtype": "bfloat16" for each in ("model", "rollout") if each in config}
    is_narrow = model.dtype == "bfloat16" or (setup.device is None and not bfloat16_instructions())  # or far slower
    return ({} if is_narrow else {"model.dtype=bfloat16": narrow}) | {
        f"{key}={str(value).lower() if isinstance(value, bool) else value}": {key: value}
        for is_open, key, value in found
        if is_open
    }


def _shards(setup: Setup, name: str, engine: str) -> int:
    """Returns the number of shards of a role's model with another engine; 0 if a package of the engine is missing."""
    try:
        return estimate.spread_of(setup, name, engine).shards
    except ModuleNotFoundError:
        return 0


def _too_much_memory(setup: Setup, room: Room, replan: Callable[[Any], Setup]) -> ConfigError:
    memory = room.memory
    phase = max(memory.phases, key=lambda each: memory.total(each, on_device=room.on_device))
    items = [item for item in memory.items if item.on_device == room.on_device]
    parts = sorted(items, key=lambda item: -item.by_phase.get(phase, 0))
    largest = ", ".join(f"{part.name} {size(part.by_phase[phase])}" for part in parts[:4] if phase in part.by_phase)
    if memory.untouched_bytes:
        largest += f"; without {size(memory.untouched_bytes)} of the KV cache that are reserved but never written"
    lines = [
        "change some of these settings:",
        *advice(changes(setup, room, replan), room.free or 0),
        f"`whet plan` shows the whole estimate; {ANYWAY}=1 in the environment starts the run anyway",
    ]
    found = f"this run needs about {size(room.needed)} in the phase {phase} ({largest})"
    return ConfigError("memory", found, f"at most {size(room.free or 0)}, free in {room.name}", "\n".join(lines))


def advice(found: list[Change], free: int) -> list[str]:
    """Returns a line for each change, and advice if no change is enough."""
    lines = [
        f"- {each.override} saves {size(each.saved_bytes)}" + (": it fits" if each.needed_bytes <= free else "")
        for each in found
    ]
    if not any(each.needed_bytes <= free for each in found):
        least = min((each.needed_bytes for each in found), default=None)
        still = "no setting saves much" if least is None else f"even then the run needs {size(least)}"
        lines.append(f"- {still}: use a smaller model, or a machine with more memory")
    return lines
