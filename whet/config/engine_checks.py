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
    """The settings of a role's engine: the argument of the check that an engine registers as `check=`.

    That function returns one line for each error. Its module is imported when a config is loaded, so it must not load
    torch."""

    key: str  # actor.engine
    engine: EngineConfig
    options: Mapping[str, Any]  # with defaults
    model: ModelConfig
    optim: OptimConfig | None
    optim_key: str
    processes: int
    processes_key: str


def engine_rule(engine: EngineConfig, at: Place) -> Iterator[str]:
    """Checks the settings of an engine: the rules of all engines, then those that the engine registered."""
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
            f"{use.key}.compile=true has no effect with model.gradient_checkpointing=true: torch does not compile "
            "checkpointed layers; unset one of these two keys"
        )
    rounding = None if use.optim is None else use.optim.weight_rounding
    if rounding is not None and use.model.dtype != "bfloat16":
        yield (
            f"{use.optim_key}.weight_rounding={rounding} keeps weights in bfloat16, but model.dtype is "
            f"{use.model.dtype}; set model.dtype=bfloat16"
        )
    if "check" in entry.marks:
        own: Callable[[EngineUse], Iterable[str]] = load_target(entry.marks["check"])
        yield from own(use)
