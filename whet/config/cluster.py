# SPDX-License-Identifier: Apache-2.0
"""The config of processes and pools, and the questions about it: which pool hosts a role, how many ranks it has."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from whet.config.section import Section, key

# In `roles` of a pool; teacher means all teachers.
ROLES = ("actor", "critic", "environment", "ref", "reward", "reward_model", "rollout", "teacher")
ADDRESS = (
    "host:port of a running Ray cluster, auto, or local; unset: RAY_ADDRESS, else a cluster on this machine, else a "
    "new one that ends with the run"
)
PROCESSES = (
    "ranks of every role; 1 with backend=local runs in the calling process; 1 with several GPUs or nodes means one for "
    "each"
)
PLACEMENT = (
    f"pools of processes by name, each {{processes: , devices: , roles: [{', '.join(ROLES)}]}}; roles in no pool go to "
    "the first one, environment and reward to the process of the loop; empty: one pool of cluster.processes processes "
    "for all roles"
)


class PoolConfig(Section):
    """A pool: processes that some roles share."""

    processes: PositiveInt = key(1, "processes of the pool: ranks of each of its roles")
    devices: PositiveInt = key(1, "GPUs of each process; several only for a rollout engine that computes on several")
    roles: list[str] = key([], f"roles of the pool, from {', '.join(ROLES)}")


class ClusterConfig(Section):
    """Processes, nodes and pools of the roles."""

    backend: Literal["local", "ray"] = key("local", "local: processes on this machine; ray: actors on a Ray cluster")
    address: str | None = key(None, ADDRESS)
    nnodes: PositiveInt = key(1, "Ray nodes, with the same number of processes on each")
    n_gpus_per_node: NonNegativeInt = key(0, "GPUs to reserve on each node, one for each process; 0: none")
    processes: PositiveInt = key(1, PROCESSES)
    placement: dict[str, PoolConfig] = key({}, PLACEMENT)
    deadline_seconds: PositiveFloat = key(1800.0, "longest wait for one call of a worker, in seconds")

    @model_validator(mode="before")
    @classmethod
    def _one_process_a_device(cls, values: object) -> object:
        match values:
            case dict() if values.get("processes", 1) == 1 and not values.get("placement"):
                nodes, gpus = values.get("nnodes", 1), values.get("n_gpus_per_node", 0)
                if type(nodes) is int and type(gpus) is int and nodes * max(gpus, 1) > 1:
                    return {**values, "processes": nodes * max(gpus, 1)}
        return values

    @property
    def pools(self) -> dict[str, PoolConfig]:
        """The pools by name; the first has every role that no pool lists."""
        return self.placement or {"main": PoolConfig(processes=self.processes)}

    @property
    def devices(self) -> int:
        """Devices of all pools; on the host shares of its cores."""
        return sum(pool.processes * pool.devices for pool in self.pools.values())

    @property
    def devices_here(self) -> int:
        """The number of devices of one node."""
        return -(-self.devices // self.nnodes)

    @property
    def stays_here(self) -> bool:
        """Tells whether the workers run in the calling process."""
        return self.backend == "local" and not self.placement and self.processes == 1

    def pool_of(self, role: str) -> str:
        """The name of the pool that hosts a role."""
        name = role.partition(":")[0]  # teacher:gsm8k is a teacher
        return next((pool for pool, each in self.pools.items() if name in each.roles), next(iter(self.pools)))

    def lists(self, role: str) -> bool:
        """Tells whether a pool lists the role."""
        return any(role in pool.roles for pool in self.placement.values())

    def processes_of(self, role: str) -> int:
        """The number of ranks of a role."""
        return self.pools[self.pool_of(role)].processes

    def replica_ranks(self, options: Mapping[str, object]) -> int:
        """Consecutive ranks of the rollout on whose devices an engine with these options computes; 1 where it has those
        of its own rank alone."""
        server, own = options.get("server"), self.pools[self.pool_of("rollout")].devices
        names = ("pipeline_parallel_size", "pp_size")  # of vLLM's and SGLang's arguments
        stages = [server.get(name) for name in names] if isinstance(server, Mapping) else []
        sizes = [size for size in (options.get("tensor_parallel_size"), *stages) if isinstance(size, int)]
        return max(1, prod(sizes) // own) if sizes else 1

    def replica_devices(self, options: Mapping[str, object]) -> int:
        """Devices of an engine of the rollout with these options."""
        return self.replica_ranks(options) * self.pools[self.pool_of("rollout")].devices

    def processes_key(self, role: str) -> str:
        """The config key of the number of ranks of a role."""
        return f"cluster.placement.{self.pool_of(role)}.processes" if self.placement else "cluster.processes"
