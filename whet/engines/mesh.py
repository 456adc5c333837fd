# SPDX-License-Identifier: Apache-2.0
"""The grid of a role's processes, from the option `mesh`. Does not import torch.

    pipeline x replicate x shard x context x tensor = processes        `pipeline` is the outermost dimension

`expert` is not another factor. It divides shard x context, the ranks over which other weights are sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from whet.errors import ConfigError
from whet.registry import warn_of

FACTORS = ("tensor", "context", "pipeline", "replicate", "shard")  # in the order in which they are checked
GRID = ("pipeline", "replicate", "shard", "context", "tensor")  # from the outermost
FORMER = {"tensor_parallel_size": "tensor", "sequence_parallel_size": "context", "shard_size": "shard"}


@dataclass(frozen=True)
class Mesh:
    """The sizes of the grid of processes of a role, by dimension."""

    replicate: int = 1  # copies of everything
    shard: int = 1  # parts of a mini-batch's rows, in each copy
    context: int = 1  # parts of a row's tokens
    tensor: int = 1  # parts of a layer's heads and MLP neurons
    expert: int = 1  # parts of the experts
    pipeline: int = 1  # parts of the layers, one after another

    @classmethod
    def of(cls, processes: int, given: Mapping[str, int] | None) -> Mesh:
        """Returns the grid of `processes`. `shard` or `replicate`, if unset, takes the remaining processes."""
        sizes = dict(given or {})
        rest = "replicate" if "shard" in sizes and "replicate" not in sizes else "shard"
        taken = prod(size for name, size in sizes.items() if name in FACTORS)
        return cls(**{rest: max(1, processes // taken), **sizes})

    def at(self, rank: int) -> dict[str, int]:
        """Returns the coordinates of a rank in the dimensions larger than one. `tensor` varies fastest."""
        found, left = dict[str, int](), rank
        for name in reversed(GRID):
            left, found[name] = divmod(left, getattr(self, name))
        found["expert"] = rank // self.tensor % self.expert
        return {name: found[name] for name in (*GRID, "expert") if getattr(self, name) > 1}

    @property
    def holders(self) -> int:
        """The number of ranks over which FSDP shards one copy of a weight, in one pipeline stage and tensor part."""
        return self.shard * self.context

    @property
    def row_ranks(self) -> int:
        """The number of ranks of a pipeline stage that compute the same row together."""
        return self.context * self.tensor

    @property
    def shards(self) -> int:
        """The number of shards of one copy of the model; each rank of the copy has one shard."""
        return self.holders * self.tensor * self.pipeline

    @property
    def stage_ranks(self) -> int:
        """The number of ranks of a pipeline stage."""
        return self.replicate * self.holders * self.tensor


def row_ranks(processes: int, options: Mapping[str, Any]) -> int:
    """Returns the number of ranks, of all pipeline stages, that compute the same row together."""
    mesh = Mesh.of(processes, options["mesh"])
    return mesh.row_ranks * mesh.pipeline


def of_former(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Converts the former options in `FORMER` to `mesh`. (`shard_size` was the product of today's shard and context.)

    Raises: ConfigError for former sizes that have no counterpart."""
    options, sizes = dict(given), dict(given.get("mesh") or {})
    context = options.get("sequence_parallel_size") or 1
    for old in [name for name in FORMER if name in options]:
        size = options.pop(old)
        if old == "shard_size" and size is not None and context > 1:
            if size % context:
                expected = f"a multiple of sequence_parallel_size={context}"
                raise ConfigError(f"{where}.{old}", size, expected, f"set {where}.mesh")
            size //= context
        if size is not None and (old == "shard_size" or size != 1):
            warn_of(old, f"mesh.{FORMER[old]}", where)
            sizes.setdefault(FORMER[old], size)
    return {**options, "mesh": sizes} if sizes else options
