# SPDX-License-Identifier: Apache-2.0
"""Checks for settings that FSDP2 cannot combine. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from whet.config.algorithm_checks import EngineUse, other_kernels
from whet.engines.mesh import FACTORS, Mesh
from whet.engines.sizes import uneven_experts, uneven_sizes
from whet.errors import ConfigError


def refuses(use: EngineUse) -> Iterator[ConfigError]:
    """Yields an error for each setting that the fsdp engine does not support."""
    yield from other_kernels(use)
    yield from _sizes(use)
    key, mesh = f"{use.key}.options.mesh", Mesh.of(use.processes, use.options["mesh"])
    if mesh.context > 1 and use.engine.packing is False:
        expected = f"1 with {use.key}.packing=false: only packed rows are split by tokens"
        yield ConfigError(f"{key}.context", mesh.context, expected, f"unset {use.key}.packing")
    if mesh.context > 1 and use.media:
        expected = f"1, as {use.media} has images or videos, which are not split by tokens"
        change = "set it to 1, or exclude such rows (data.filter)"
        yield ConfigError(f"{key}.context", mesh.context, expected, change)
    if mesh.pipeline > 1:
        yield from _pipeline(use, key, mesh.pipeline)
    if (path := use.model.lora.path) is not None:
        found = f"fsdp, which cannot merge the adapter of model.lora.path={path} while it loads the model"
        change = "export the merged model first, and set model.path to its folder"
        yield ConfigError(f"{use.key}.name", found, "", change)
    for name, size in (("tensor", mesh.tensor), ("expert", mesh.expert)):
        if size > 1 and use.optim is not None and use.optim.state_dtype == "int8":
            expected = f"another dtype: int8 uses blocks along rows of a weight, which {key}.{name}={size} cuts"
            yield ConfigError(f"{use.optim_key}.state_dtype", "int8", expected, "set bfloat16")


def _pipeline(use: EngineUse, key: str, size: int) -> Iterator[ConfigError]:
    """Yields an error for each setting that a pipeline does not support."""
    reasons = {
        f"model.lora.rank={use.model.lora.rank}": use.model.lora.rank is not None,
        f"{use.key}.packing=false": use.engine.packing is False,
        f"{use.key}.options.router_bias_rate": use.options["router_bias_rate"] > 0,
        f"the images or videos of {use.media}": bool(use.media),
    }
    for reason in (each for each, holds in reasons.items() if holds):
        yield ConfigError(f"{key}.pipeline", size, f"1 with {reason}", "set it to 1")


def _sizes(use: EngineUse) -> Iterator[ConfigError]:
    """Yields an error for mesh sizes whose product differs from the number of processes."""
    key, given = f"{use.key}.options.mesh", use.options["mesh"] or {}
    if uneven := list(uneven_sizes(use, key, given)):
        yield from uneven
        return
    left = use.processes // prod(given[name] for name in FACTORS if name in given)
    if left > 1 and "shard" in given and "replicate" in given:
        size, whole = given["shard"], f"{use.processes_key}={use.processes}"
        yield ConfigError(f"{key}.shard", size, f"{size * left}, as the product is {whole}", "set it, or unset it")
    mesh = Mesh.of(use.processes, given)
    yield from uneven_experts(key, mesh.expert, mesh.holders, f"shard x context = {mesh.shard} x {mesh.context}")
