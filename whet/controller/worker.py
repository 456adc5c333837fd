# SPDX-License-Identifier: Apache-2.0
"""Workers and their pools. A worker is the object of a role in one process; it serves the calls of its group."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch

from whet.config.cluster import ClusterConfig, ResourcePool as ResourcePool
from whet.devices import HOST
from whet.errors import ConfigError


class Host(NamedTuple):
    """The machine and address of a rank, and the devices that it sees, named as in CUDA_VISIBLE_DEVICES."""

    node: str
    address: str
    devices: str


@dataclass(frozen=True)
class Placement:
    """The role, rank and device of a worker. The backend passes it as the first argument of the worker's class."""

    role: str  # of its group: actor, critic, rollout, ...
    rank: int = 0  # of its process, from 0
    world_size: int = 1  # number of ranks of the role
    process_group: torch.distributed.ProcessGroup | None = None  # of the ranks; None with a single process
    neighbours: Mapping[str, Worker] = field(default_factory=dict)  # see `Worker`
    address: str = "127.0.0.1"  # under which workers on other machines reach this one
    device: torch.device = HOST  # shared by the roles of this process
    hosts: Sequence[Host] = ()  # on Ray: of all ranks of the pool


class Worker:
    """A rank of a role. Subclasses call `super().__init__(placement)` first and mark the methods of the group with
    `@register`. Methods must not modify their arguments: within one process they are the caller's own objects.

    `neighbours` are the workers of other roles in this process, by role; during `__init__`, only workers built earlier.
    From there a rollout worker gets the actor's module without a copy."""

    # True: the ranks of the role are independent and have no process group. If all workers of a pool are replicas, a
    # lost rank may be started again.
    is_replica: ClassVar[bool] = False

    def __init__(self, placement: Placement) -> None:
        self.role, self.rank, self.world_size = placement.role, placement.rank, placement.world_size
        self.process_group, self.neighbours = placement.process_group, placement.neighbours
        self.address, self.device = placement.address, placement.device

    @property
    def dp_rank(self) -> int:
        """The number of this worker's shard of a batch; equal for ranks that share a model (tensor parallel)."""
        return self.rank

    @property
    def dp_size(self) -> int:
        """The number of shards of a batch. It is the same on every rank."""
        return self.world_size

    @property
    def is_reporting(self) -> bool:
        """True on exactly one of the ranks with the same `dp_rank`. The group uses this rank's results."""
        return True

    def close(self) -> None:
        """Releases files and processes that would outlive the worker. Called once, in an orderly end only."""


@dataclass(frozen=True)
class WorkerSpec:
    """The constructor call for the workers of a role: `cls(placement, *args, **kwargs)` on every rank. It is sent as a
    pickle, so the class must be in a module that other processes can import."""

    role: str
    cls: type[Worker]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankLayout:
    """The data-parallel position of a worker, and whether it reports results."""

    dp_rank: int
    dp_size: int
    is_reporting: bool


def pools_of(cluster: ClusterConfig, specs: Sequence[WorkerSpec]) -> list[ResourcePool]:
    """Returns the pools of the config that host roles of `specs`, and sets the `roles` of each pool."""
    hosted = {name: tuple(spec.role for spec in specs if cluster.pool_of(spec.role) == name) for name in cluster.pools}
    return [replace(pool, roles=roles) for pool in cluster.resources if (roles := hosted[pool.name])]


def with_roles(specs: Sequence[WorkerSpec], pools: Sequence[ResourcePool]) -> list[ResourcePool]:
    """Checks that each role is in exactly one pool. A single pool without roles gets all roles. Raises: ConfigError."""
    roles = [spec.role for spec in specs]
    if not specs or len(set(roles)) < len(roles):
        raise ConfigError("roles of a launch", roles, "at least one role, and each role once")
    if len(pools) == 1 and not pools[0].roles:
        return [replace(pools[0], roles=tuple(roles))]
    placed = [role for pool in pools for role in pool.roles]
    if sorted(placed) != sorted(roles):
        raise ConfigError("roles of the pools", placed, f"the roles of the workers, each in one pool: {roles}")
    return list(pools)


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if "sched_getaffinity" in vars(os) else os.cpu_count() or 1
