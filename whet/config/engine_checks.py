# SPDX-License-Identifier: Apache-2.0
"""What training engines can and cannot do together, and with how many processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from whet.config.choice import entry_at
from whet.config.schema import EngineConfig, ModelConfig, OptimConfig, SFTConfig, TrainConfig
from whet.errors import ConfigError
from whet.registry import ENGINES, load_target


@dataclass(frozen=True)
class EngineUse:
    """One role's engine and what it is used for: the argument of an engine's own check, `check=` where it registers.

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


def engine_checks(config: TrainConfig | SFTConfig) -> list[Callable[[], object]]:
    """For each role's engine and optimizer."""
    roles: list[tuple[str, EngineConfig, OptimConfig | None]] = (
        [("", config.engine, config.optim)]
        if isinstance(config, SFTConfig)
        else [
            ("actor.", config.actor.engine, config.actor.optim),
            ("critic.", config.critic.engine, config.critic.optim),
            ("ref.", config.ref.engine, None),
        ]
    )
    return [partial(_check_engine, config, prefix, engine, optim) for prefix, engine, optim in roles]


def _check_engine(
    config: TrainConfig | SFTConfig, prefix: str, engine: EngineConfig, optim: OptimConfig | None
) -> None:
    key, role, cluster = f"{prefix}engine", prefix.removesuffix(".") or "actor", config.cluster
    pool = f"placement.{cluster.pool_of(role)}." if cluster.placement else ""
    entry = entry_at(ENGINES, f"{key}.name", engine.name)
    use = EngineUse(
        key,
        engine,
        entry.resolve_options(engine.options, f"{key}.options"),
        config.model,
        optim,
        f"{prefix}optim",
        cluster.processes_of(role),
        f"cluster.{pool}processes",
    )
    own: Callable[[EngineUse], Iterable[str]] | None = (
        load_target(entry.marks["check"]) if "check" in entry.marks else None
    )
    if found := [*_shared(use), *(own(use) if own is not None else ())]:
        raise ConfigError("\n".join(found))


def _shared(use: EngineUse) -> Iterable[str]:
    """What no engine can do."""
    if use.engine.compile and use.model.gradient_checkpointing:
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
