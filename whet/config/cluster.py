# SPDX-License-Identifier: Apache-2.0
"""Places of the roles: settings, and what follows from them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from whet.config.section import Section, key

ROLES = ("actor", "critic", "ref", "rollout", "teacher")  # that a pool can name; teacher stands for all teachers
ADDRESS = (
    "host:port of a running Ray cluster, auto, or local; unset: RAY_ADDRESS, else a cluster on this machine, else one "
    "is started and ended with the run"
)
PROCESSES = "ranks of every role; 1 with backend=local stays in this process; 1 with several GPUs or nodes: one on each"
PLACEMENT = (
    "pools of processes by name, each {processes: , roles: [actor, critic, ref, rollout, teacher]}; a role that none "
    "names goes to the first; empty: one pool of cluster.processes for all roles"
)


class PoolConfig(Section):
    """Processes that some roles share."""

    processes: PositiveInt = key(1, "ranks of each of its roles")
    roles: list[str] = key([], f"of {', '.join(ROLES)}")


class ClusterConfig(Section):
    """Processes, nodes and pools of the roles."""

    backend: Literal["local", "ray"] = key("local", "processes on this machine, or actors on a cluster")
    address: str | None = key(None, ADDRESS)
    nnodes: PositiveInt = key(1, "Ray nodes that the processes are spread over, as many on each")
    n_gpus_per_node: NonNegativeInt = key(0, "GPUs taken on each node, one a process; 0: none")
    processes: PositiveInt = key(1, PROCESSES)
    placement: dict[str, PoolConfig] = key({}, PLACEMENT)
    deadline_seconds: PositiveFloat = key(1800.0, "the longest wait for one call of a worker")

    @model_validator(mode="before")
    @classmethod
    def _one_process_a_device(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("processes", 1) != 1 or values.get("placement"):
            return values
        nodes, gpus = values.get("nnodes", 1), values.get("n_gpus_per_node", 0)
        if not (type(nodes) is int and type(gpus) is int) or nodes * max(gpus, 1) <= 1:
            return values
        return {**values, "processes": nodes * max(gpus, 1)}

    @property
    def pools(self) -> dict[str, PoolConfig]:
        """The pools by name; the first has every role that no other names."""
        return self.placement or {"main": PoolConfig(processes=self.processes)}

    @property
    def world_size(self) -> int:
        """Processes of all pools."""
        return sum(pool.processes for pool in self.pools.values())

    @property
    def processes_here(self) -> int:
        """Processes that share a machine."""
        return -(-self.world_size // self.nnodes)

    @property
    def stays_here(self) -> bool:
        """Tells whether workers run in the calling process itself."""
        return self.backend == "local" and not self.placement and self.processes == 1

    def pool_of(self, role: str) -> str:
        """The name of the pool that hosts a role."""
        name = role.partition(":")[0]  # teacher:gsm8k is a teacher
        return next((pool for pool, each in self.pools.items() if name in each.roles), next(iter(self.pools)))

    def processes_of(self, role: str) -> int:
        """The number of ranks of a role."""
        return self.pools[self.pool_of(role)].processes

    def processes_key(self, role: str) -> str:
        """The key that gives this number."""
        return f"cluster.placement.{self.pool_of(role)}.processes" if self.placement else "cluster.processes"
