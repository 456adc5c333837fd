# SPDX-License-Identifier: Apache-2.0
"""Settings that do not go together with FSDP2, found without torch."""

from __future__ import annotations

from collections.abc import Iterator

from whet.config.algorithm_checks import nearest_divisors
from whet.config.engine_checks import EngineUse

SIZES = ("tensor_parallel_size", "sequence_parallel_size", "shard_size")


def check(use: EngineUse) -> Iterator[str]:
    """Yields an error for each setting of the engine that fsdp cannot run with."""
    key, sizes = f"{use.key}.options", {name: use.options[name] for name in SIZES}
    tensor, sequence, _ = sizes.values()
    if sequence > 1 and tensor > 1:
        yield (
            f"{key}.sequence_parallel_size={sequence} and {key}.tensor_parallel_size={tensor} both share out the "
            "heads; set one of them to 1"
        )
    if sequence > 1 and use.engine.packing is False:
        yield f"{key}.sequence_parallel_size={sequence} shares out packed rows; unset {use.key}.packing"
    yield from _sizes(use, sizes)
    if use.model.lora.path is not None:
        yield (
            f"{use.key}.name=fsdp merges no adapter while it loads, and model.lora.path={use.model.lora.path}; export "
            "the merged model first, and name its folder as model.path"
        )
    if tensor > 1 and use.model.lora.rank is not None:
        yield (
            f"{key}.tensor_parallel_size={tensor} splits layers that model.lora.rank={use.model.lora.rank} adapts; set "
            "it to 1"
        )
    if tensor > 1 and use.optim is not None and use.optim.state_dtype == "int8":
        yield (
            f"{use.optim_key}.state_dtype=int8 has blocks along rows that {key}.tensor_parallel_size={tensor} cuts; "
            "set bfloat16"
        )


def _sizes(use: EngineUse, sizes: dict[str, int]) -> Iterator[str]:
    """Sizes that do not divide the processes."""
    tensor, key = sizes["tensor_parallel_size"], f"{use.key}.options"
    name = "tensor_parallel_size" if tensor > 1 else "sequence_parallel_size"
    if use.processes % sizes[name]:
        near = " or ".join(str(each) for each in nearest_divisors(use.processes, sizes[name]))
        yield f"{key}.{name}={sizes[name]} must divide {use.processes_key}={use.processes}; try {near}"
        return
    holders, shards = use.processes // tensor, sizes["shard_size"]
    if shards is not None and holders % shards:
        near = " or ".join(str(each) for each in nearest_divisors(holders, shards))
        yield f"{key}.shard_size={shards} must divide the {holders} processes that hold shards; try {near}"
