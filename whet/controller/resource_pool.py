# SPDX-License-Identifier: Apache-2.0
"""Pools of processes that host workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from whet.config.cluster import ClusterConfig
from whet.controller.worker import WorkerSpec
from whet.errors import ConfigError


@dataclass(frozen=True)
class ResourcePool:
    """A pool of processes. Each hosts one rank of every role of the pool."""

    processes: int = 1
    roles: tuple[str, ...] = ()  # empty: the only pool, which hosts all roles
    name: str = "main"

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ConfigError(f"a pool of {self.processes} processes: expected at least 1; set cluster.processes")


def pools_of(cluster: ClusterConfig, specs: Sequence[WorkerSpec]) -> list[ResourcePool]:
    """The pools of the config's placement with the roles of `specs`, without pools that host no role."""
    hosted = {name: tuple(spec.role for spec in specs if cluster.pool_of(spec.role) == name) for name in cluster.pools}
    return [ResourcePool(cluster.pools[name].processes, roles, name) for name, roles in hosted.items() if roles]


def with_roles(specs: Sequence[WorkerSpec], pools: Sequence[ResourcePool]) -> list[ResourcePool]:
    """The pools with their roles filled in.  Raises: ConfigError unless each role of `specs` is in exactly one pool."""
    roles = [spec.role for spec in specs]
    if not specs or len(set(roles)) < len(roles):
        raise ConfigError(f"launch of roles {roles}: expected at least one, and each once")
    if len(pools) == 1 and not pools[0].roles:
        return [ResourcePool(pools[0].processes, tuple(roles), pools[0].name)]
    placed = [role for pool in pools for role in pool.roles]
    if sorted(placed) != sorted(roles):
        raise ConfigError(f"pools for {placed} and workers for {roles}: every role needs one pool, every pool a role")
    return list(pools)


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if "sched_getaffinity" in vars(os) else os.cpu_count() or 1
