# SPDX-License-Identifier: Apache-2.0
"""The arrangement of a role's ranks: their shards of the weights and of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from whet.devices import backends
from whet.errors import ConfigError


@dataclass(frozen=True)
class Ranks:
    """The ranks of a role. `inner` consecutive ones read the same rows: each a part of their tokens or of the model's
    heads. Weights lie in shards over `shard_mesh`, whose first dimension counts replicas where it has two."""

    group: dist.ProcessGroup
    inner: int
    shard_mesh: DeviceMesh
    tensor_mesh: DeviceMesh | None  # over the inner ranks, where they split the model
    inner_group: dist.ProcessGroup
    rows_group: dist.ProcessGroup  # ranks with the same place among the inner ones: together they read every row once

    @property
    def dp_rank(self) -> int:
        """Number of the rows' shard that this rank reads."""
        return dist.get_rank(self.group) // self.inner

    @property
    def dp_size(self) -> int:
        """Into how many shards rows are split."""
        return dist.get_world_size(self.group) // self.inner

    @property
    def is_reporting(self) -> bool:
        """True on the first of the inner ranks."""
        return dist.get_rank(self.group) % self.inner == 0


def arrange(
    group: dist.ProcessGroup | None,
    device_type: str,
    *,
    shard_size: int | None = None,
    sequence_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
) -> Ranks:
    """The arrangement of the ranks in `group` (None: of this process alone).  Raises: ConfigError."""
    group = group if group is not None else _alone(device_type)
    ranks = dist.get_process_group_ranks(group)
    inner = sequence_parallel_size * tensor_parallel_size
    if len(ranks) % inner:
        raise ConfigError(
            f"sequence_parallel_size x tensor_parallel_size = {inner} does not divide the {len(ranks)} ranks of the "
            f"role; try {', '.join(str(each) for each in divisors(len(ranks)))}"
        )
    holders = len(ranks) // tensor_parallel_size  # of different shards or replicas of them
    shards = holders if shard_size is None else shard_size
    if holders % shards:
        raise ConfigError(
            f"engine.options.shard_size={shards} does not divide the {holders} ranks that hold shards; try "
            f"{', '.join(str(each) for each in divisors(holders))}"
        )
    sizes = {"replicate": holders // shards, "shard": shards, "tensor": tensor_parallel_size}
    mesh = _mesh(group, {name: size for name, size in sizes.items() if size > 1 or name == "shard"}, device_type)
    names = tuple(name for name in ("replicate", "shard") if sizes[name] > 1 or name == "shard")
    grid = torch.tensor(ranks).view(-1, inner)
    return Ranks(
        group=group,
        inner=inner,
        shard_mesh=mesh[names],
        tensor_mesh=mesh["tensor"] if tensor_parallel_size > 1 else None,
        inner_group=_line(group, grid.tolist()),
        rows_group=_line(group, grid.T.tolist()),
    )


def divisors(number: int) -> list[int]:
    """Returns the divisors, rising."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _mesh(group: dist.ProcessGroup, sizes: Mapping[str, int], device_type: str) -> DeviceMesh:
    """The group's ranks in this shape, without a call on ranks that are not in it."""
    grid = torch.tensor(dist.get_process_group_ranks(group)).view(*sizes.values())
    lines = [grid.movedim(dim, -1).reshape(-1, grid.shape[dim]).tolist() for dim in range(grid.dim())]
    groups = [_line(group, each) for each in lines]
    return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=tuple(sizes))


def _line(group: dist.ProcessGroup, lines: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """The group of that one of the lines that this rank is in."""
    ranks = next(line for line in lines if dist.get_rank() in line)
    if list(ranks) == dist.get_process_group_ranks(group):
        return group
    made = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _alone(device_type: str) -> dist.ProcessGroup:
    """A group of this process, which roles of one process share."""
    if not dist.is_initialized():
        dist.init_process_group(backends(device_type), store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    return dist.group.WORLD
