# SPDX-License-Identifier: Apache-2.0
"""Rules about training engines, and about the processes that they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from whet.config.choice import entry_at
from whet.config.cluster import ClusterConfig
from whet.config.schema import EngineConfig, ModelConfig, OptimConfig
from whet.config.section import Place
from whet.registry import ENGINES, load_target


@dataclass(frozen=True)
class EngineUse:
    """The engine of a role and its use: the argument of an engine's own check, `check=` where it registers.

    Such a function returns a line for everything that cannot be; its module is imported when a config is loaded, and so
    loads no torch."""

    key: str  # actor.engine
    engine: EngineConfig
    options: Mapping[str, Any]  # all of the engine's
    model: ModelConfig
    optim: OptimConfig | None
    optim_key: str
    processes: int
    processes_key: str


def engine_rule(engine: EngineConfig, at: Place) -> Iterator[str]:
    """Combinations that no engine can do, then those that this one cannot."""
    cluster: ClusterConfig = at.whole["cluster"]
    prefix = at.key.removesuffix("engine")
    role = prefix.removesuffix(".") or "actor"
    entry = entry_at(ENGINES, at.of("name"), engine.name)
    use = EngineUse(
        at.key,
        engine,
        entry.resolve_options(engine.options, at.of("options")),
        at.whole["model"],
        at.parent.get("optim"),
        f"{prefix}optim",
        cluster.processes_of(role),
        cluster.processes_key(role),
    )
    if engine.compile and use.model.gradient_checkpointing:
        yield (
            f"{use.key}.compile=true compiles layers, and torch runs those that model.gradient_checkpointing computes "
            "twice as they are; unset one of them"
        )
    rounding = None if use.optim is None else use.optim.weight_rounding
    if rounding is not None and use.model.dtype != "bfloat16":
        yield (
            f"{use.optim_key}.weight_rounding={rounding} keeps weights in bfloat16, and model.dtype={use.model.dtype}; "
            "set model.dtype=bfloat16"
        )
    if "check" in entry.marks:
        own: Callable[[EngineUse], Iterable[str]] = load_target(entry.marks["check"])
        yield from own(use)
