# SPDX-License-Identifier: Apache-2.0
"""Whether a run fits into memory and onto the disk, and what to change where it does not."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.config.schema import ActorConfig, SFTConfig, TrainConfig
from whet.errors import ConfigError, ModelError
from whet.planning.machine import FreeMemory, free_disk, free_memory
from whet.planning.memory import Memory, Setup, inner_size, mini_batch, plan_memory, rollout_bytes, sampling_bytes
from whet.planning.outline import FLOAT32

log = logging.getLogger(__name__)
ANYWAY = "WHET_START_ANYWAY"  # set in the environment: a run that does not fit by the estimate starts all the same


@dataclass(frozen=True)
class Change:
    """A setting that makes a run smaller, and what it needs then."""

    override: str  # as on the command line
    resident_bytes: int
    saved_bytes: int


def check_fits(setup: Setup, run_dir: Path, replan: Callable[[Any], Setup], reclaimed_bytes: int = 0) -> None:
    """Refuses a run that needs more memory or disk than there is, before its models are loaded.

    `reclaimed_bytes` of the disk are free once it has started.

    Small runs on large machines are not planned in detail: a bound that is quickly computed says enough.
    Raises: ConfigError with the numbers, what to change, and how to start anyway.
    """
    if os.environ.get(ANYWAY, "0") not in ("", "0"):
        return
    free = free_memory()
    try:
        cluster = setup.config.cluster
        processes = 0 if cluster.placement else cluster.processes_here  # roles of several pools are not added up
        if free is not None and upper_bound(setup) * processes > free.bytes / 2:
            memory = plan_memory(setup)
            needed = memory.resident_bytes * processes
            if memory.touched_bytes * processes > free.bytes:  # without what is estimated on top
                raise ConfigError(_too_much_memory(setup, memory, needed, free, replan))
            if needed > 0.8 * free.bytes:
                log.warning(
                    "this run needs about %s of memory, and %s are free; `whet plan` shows what takes it",
                    size(needed),
                    size(free.bytes),
                )
    except ModelError as error:  # loading the model will say so
        log.debug("no estimate: %s", error)
        return
    _check_disk(setup, run_dir, free_disk(run_dir) + reclaimed_bytes)


def upper_bound(setup: Setup) -> int:
    """More bytes than a run takes in one process, without looking at its passes one operator at a time."""
    config, total = setup.config, 0
    for name, model in setup.outlines.items():
        total += model.weight_bytes * (4 if name in setup.objectives else 1)
        shape = model.config
        rows = mini_batch(config, name, setup.lengths) if name in setup.objectives else []
        longest = max((row.tokens for row in rows), default=0)
        tokens = min(max(setup.roles[name].micro_batch_tokens("cpu"), longest), sum(row.tokens for row in rows))
        states = 30 * shape.hidden_size + 10 * inner_size(shape) + 3 * shape.num_attention_heads * longest
        total += 2 * FLOAT32 * tokens * shape.num_hidden_layers * states
        chunk = min(setup.roles[name].forward.chunk_tokens, tokens)
        total += shape.vocab_size * (24 * chunk + 3 * FLOAT32 * shape.hidden_size)
    if isinstance(config, TrainConfig):
        model = setup.outlines["actor"]
        planned = rollout_bytes(config, model.config, setup.lengths)
        total += model.weight_bytes + planned.written + sampling_bytes(config, model.config, planned)
    return total


def changes(setup: Setup, memory: Memory, replan: Callable[[Any], Setup]) -> list[Change]:
    """What makes the run smaller by a fiftieth or more, what saves most first, and last all of it together; each is
    planned anew."""
    candidates, found = dict(_candidates(setup, memory)), []

    def planned(*overrides: str) -> Change:
        values = {key: value for each in overrides for key, value in candidates[each].items()}
        after = plan_memory(replan(changed(setup.config, values)))
        return Change(" ".join(overrides), after.resident_bytes, memory.resident_bytes - after.resident_bytes)

    found = [planned(each) for each in candidates]
    worth = [each for each in found if each.saved_bytes > memory.resident_bytes / 50]
    worth.sort(key=lambda each: -each.saved_bytes)
    return worth if len(worth) < 2 else [*worth, planned(*(each.override for each in worth))]


def changed(config: TrainConfig | SFTConfig, values: Mapping[str, Any]) -> TrainConfig | SFTConfig:
    """The config with other values under dotted keys."""
    tree = config.model_dump()
    for key, value in values.items():
        *sections, name = key.split(".")
        section = tree
        for each in sections:
            section = section[each]
        section[name] = value
    return type(config).model_validate(tree)


def _candidates(setup: Setup, memory: Memory) -> Iterator[tuple[str, dict[str, Any]]]:
    config = setup.config

    def one(key: str, value: Any) -> tuple[str, dict[str, Any]]:
        shown = str(value).lower() if isinstance(value, bool) else value
        return f"{key}={shown}", {key: value}

    if not config.model.gradient_checkpointing:
        yield one("model.gradient_checkpointing", True)
    if config.model.dtype == "float32":
        yield one("model.dtype", "bfloat16")
    if config.model.lora.rank is None and not config.model.freeze:
        yield one("model.lora.rank", 16)
    for name in setup.objectives:
        prefix = f"{name}." if isinstance(config, TrainConfig) else ""
        role: SFTConfig | ActorConfig = config if isinstance(config, SFTConfig) else config[name]
        longest = max(row.tokens for row in mini_batch(config, name, setup.lengths))
        allowed = longest
        if isinstance(config, TrainConfig):
            allowed = max(longest, config.data.max_prompt_length + config.data.max_response_length)
        if memory.micro_batch_tokens[name] > allowed:
            yield one(f"{prefix}max_tokens_per_micro_batch", max(allowed, memory.micro_batch_tokens[name] // 2))
        if role.engine.logits_chunk_tokens > 128:
            yield one(f"{prefix}engine.logits_chunk_tokens", 128)
        if role.optim.name == "adamw" and role.optim.state_dtype == "float32":
            yield one(f"{prefix}optim.state_dtype", "bfloat16")
    if isinstance(config, TrainConfig):
        if config.rollout.max_batch_size > 16:
            yield one("rollout.max_batch_size", max(16, config.rollout.max_batch_size // 4))
        for name, value in rollout_bytes(config, setup.outlines["actor"].config, setup.lengths).smaller.items():
            yield one(f"rollout.engine.options.{name}", value)


def _too_much_memory(
    setup: Setup, memory: Memory, needed: int, free: FreeMemory, replan: Callable[[Any], Setup]
) -> str:
    phase = memory.largest_phase
    parts = sorted(memory.items, key=lambda item: -item.by_phase.get(phase, 0))
    largest = ", ".join(f"{part.name} {size(part.by_phase[phase])}" for part in parts[:4])
    if memory.untouched_bytes:
        largest += f"; not counted {size(memory.untouched_bytes)} of the KV cache, reserved and never written to"
    lines = [
        f"this run needs about {size(needed)} of memory in its {phase} ({largest}), "
        f"and {free.bound} has {size(free.bytes)} free",
        *advice(changes(setup, memory, replan), free.bytes // setup.config.cluster.processes_here),
        f"`whet plan` shows the whole estimate; {ANYWAY}=1 in the environment starts all the same",
    ]
    return "\n".join(lines)


def advice(found: list[Change], free: int) -> list[str]:
    """A line for each change, and what to do where none of them is enough."""
    lines = [
        f"- {each.override} saves {size(each.saved_bytes)}" + (": it fits" if each.resident_bytes <= free else "")
        for each in found
    ]
    if not any(each.resident_bytes <= free for each in found):
        least = min((each.resident_bytes for each in found), default=None)
        still = "nothing here saves much" if least is None else f"even then it needs {size(least)}"
        lines.append(f"- {still}: take a smaller model, or a machine with more memory")
    return lines


def _check_disk(setup: Setup, run_dir: Path, free: int) -> None:
    needed = sum(setup.outlines[name].checkpoint_bytes for name in setup.objectives)
    limit = setup.config.trainer.save_limit
    if needed > free:
        raise ConfigError(
            f"a checkpoint takes about {size(needed)}, and {run_dir} has {size(free)} free; make room, choose another "
            f"trainer.run_dir, or set {ANYWAY}=1 in the environment to start all the same"
        )
    if limit is not None and needed * (limit + 1) > free:  # a new one is written before the oldest is deleted
        log.warning(
            "%d checkpoints and the next one take about %s, and %s has %s free; lower trainer.save_limit",
            *(limit, size(needed * (limit + 1)), run_dir, size(free)),
        )


def size(count: float) -> str:
    """Bytes as a person reads them: 1.4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1000 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.1f} {unit}"
