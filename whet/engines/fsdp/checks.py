# SPDX-License-Identifier: Apache-2.0
"""Settings that do not go together with FSDP2, found without torch."""

from __future__ import annotations

from collections.abc import Iterator

from whet.config.algorithm_checks import EngineUse, nearest_divisors, other_kernels
from whet.errors import ConfigError

SIZES = ("tensor_parallel_size", "sequence_parallel_size", "shard_size")


def refuses(use: EngineUse) -> Iterator[ConfigError]:
    """Yields an error for each setting that fsdp cannot run with."""
    yield from other_kernels(use)
    key, sizes = f"{use.key}.options", {name: use.options[name] for name in SIZES}
    tensor, sequence, _ = sizes.values()
    of_tensor = f"{key}.tensor_parallel_size={tensor}"
    if sequence > 1 and tensor > 1:
        expected = f"1 with {of_tensor}, as both share out the heads"
        yield ConfigError(f"{key}.sequence_parallel_size", sequence, expected, "set one of the two keys to 1")
    if sequence > 1 and use.engine.packing is False:
        expected = f"1 with {use.key}.packing=false: it shares out packed rows"
        yield ConfigError(f"{key}.sequence_parallel_size", sequence, expected, f"unset {use.key}.packing")
    if sequence > 1 and use.media:
        expected = f"1, as {use.media} has images or videos, which are not split by tokens"
        change = "lower it, or exclude such rows (data.filter)"
        yield ConfigError(f"{key}.sequence_parallel_size", sequence, expected, change)
    yield from _sizes(use, sizes)
    if (path := use.model.lora.path) is not None:
        found = f"fsdp merges no adapter while it loads, and model.lora.path={path}"
        change = "export the merged model first, and name its folder as model.path"
        yield ConfigError(f"{use.key}.name", found, "", change)
    if tensor > 1 and (rank := use.model.lora.rank) is not None:
        expected = f"1 with model.lora.rank={rank}, which adapts layers that it splits"
        yield ConfigError(f"{key}.tensor_parallel_size", tensor, expected, "set it to 1")
    if tensor > 1 and use.optim is not None and use.optim.state_dtype == "int8":
        expected = f"no blocks along rows, which {of_tensor} cuts"
        yield ConfigError(f"{use.optim_key}.state_dtype", "int8", expected, "set bfloat16")


def _sizes(use: EngineUse, sizes: dict[str, int]) -> Iterator[ConfigError]:
    """Sizes that do not divide the processes."""
    tensor, key = sizes["tensor_parallel_size"], f"{use.key}.options"
    name = "tensor_parallel_size" if tensor > 1 else "sequence_parallel_size"
    if use.processes % sizes[name]:
        near = " or ".join(str(each) for each in nearest_divisors(use.processes, sizes[name]))
        expected = f"a divisor of {use.processes_key}={use.processes}"
        yield ConfigError(f"{key}.{name}", sizes[name], expected, f"try {near}")
        return
    holders, shards = use.processes // tensor, sizes["shard_size"]
    if shards is not None and holders % shards:
        near = " or ".join(str(each) for each in nearest_divisors(holders, shards))
        expected = f"a divisor of the {holders} processes that hold shards"
        yield ConfigError(f"{key}.shard_size", shards, expected, f"try {near}")
