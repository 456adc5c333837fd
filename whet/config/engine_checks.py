# SPDX-License-Identifier: Apache-2.0
"""What training engines can and cannot do together, and with how many processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from whet.config.algorithm_checks import nearest_divisors
from whet.config.cluster import ClusterConfig
from whet.config.schema import EngineConfig, ModelConfig, OptimConfig, SFTConfig, TrainConfig
from whet.errors import ConfigError

ONLY_FSDP = ("shard_size", "reshard_after_forward", "cpu_offload", "sequence_parallel_size", "tensor_parallel_size")


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
    found: list[Callable[[], object]] = []
    for prefix, engine, optim in roles:
        key, role = f"{prefix}engine", prefix.removesuffix(".") or "actor"
        found += [
            partial(check_engine, key, engine),
            partial(_check_sizes, key, engine, role, config.cluster),
            partial(_check_model, key, engine, config.model),
        ]
        if optim is not None:
            found.append(partial(_check_rounding, f"{prefix}optim", optim, config.model, key, engine))
    return found


def check_engine(key: str, engine: EngineConfig) -> None:
    """Raises: ConfigError for options that this engine does not have or that exclude one another."""
    if engine.name != "fsdp":
        for name in ONLY_FSDP:
            if engine[name] != EngineConfig()[name]:
                raise ConfigError(
                    f"{key}.{name}={engine[name]} is for {key}.name=fsdp, and it is {engine.name}; set one"
                )
    if engine.sequence_parallel_size > 1 and engine.tensor_parallel_size > 1:
        raise ConfigError(
            f"{key}.sequence_parallel_size={engine.sequence_parallel_size} and {key}.tensor_parallel_size="
            f"{engine.tensor_parallel_size} both share out the heads; set one of them to 1"
        )
    if engine.sequence_parallel_size > 1 and engine.packing is False:
        raise ConfigError(
            f"{key}.sequence_parallel_size={engine.sequence_parallel_size} shares out packed rows; unset {key}.packing"
        )


def _check_sizes(key: str, engine: EngineConfig, role: str, cluster: ClusterConfig) -> None:
    processes, count = cluster.processes_of(role), "cluster.processes"
    if cluster.placement:
        count = f"cluster.placement.{cluster.pool_of(role)}.processes"
    inner, name = engine.sequence_parallel_size, "sequence_parallel_size"
    if engine.tensor_parallel_size > 1:
        inner, name = engine.tensor_parallel_size, "tensor_parallel_size"
    if processes % inner:
        near = " or ".join(str(each) for each in nearest_divisors(processes, inner))
        raise ConfigError(f"{key}.{name}={inner} must divide {count}={processes}; try {near}")
    holders = processes // engine.tensor_parallel_size
    if engine.shard_size is not None and holders % engine.shard_size:
        near = " or ".join(str(each) for each in nearest_divisors(holders, engine.shard_size))
        raise ConfigError(
            f"{key}.shard_size={engine.shard_size} must divide the {holders} processes that hold shards; try {near}"
        )


def _check_model(key: str, engine: EngineConfig, model: ModelConfig) -> None:
    if engine.name == "fsdp" and model.lora.path is not None:
        raise ConfigError(
            f"{key}.name=fsdp merges no adapter while it loads, and model.lora.path={model.lora.path}; export the "
            "merged model first, and name its folder as model.path"
        )
    if engine.compile and model.gradient_checkpointing:
        raise ConfigError(
            f"{key}.compile=true compiles layers, and torch runs those that model.gradient_checkpointing computes "
            "twice as they are; unset one of them"
        )
    if engine.tensor_parallel_size > 1 and model.lora.rank is not None:
        raise ConfigError(
            f"{key}.tensor_parallel_size={engine.tensor_parallel_size} splits layers that model.lora.rank="
            f"{model.lora.rank} adapts; set it to 1"
        )


def _check_rounding(key: str, optim: OptimConfig, model: ModelConfig, engine_key: str, engine: EngineConfig) -> None:
    if optim.weight_rounding is not None and model.dtype != "bfloat16":
        raise ConfigError(
            f"{key}.weight_rounding={optim.weight_rounding} keeps weights in bfloat16, and model.dtype={model.dtype}; "
            "set model.dtype=bfloat16"
        )
    if optim.state_dtype == "int8" and engine.tensor_parallel_size > 1:
        raise ConfigError(
            f"{key}.state_dtype=int8 has blocks along rows that {engine_key}.tensor_parallel_size="
            f"{engine.tensor_parallel_size} cuts; set bfloat16"
        )
