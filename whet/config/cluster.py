# SPDX-License-Identifier: Apache-2.0
"""The config of processes and pools. Its methods find the pool of a role, its number of ranks, and the node and devices
of a rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Literal

from annotated_types import Gt, Lt
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from whet.config.section import Section, key
from whet.errors import ConfigError

# In `roles` of a pool; teacher means all teachers.
ROLES = ("actor", "critic", "environment", "ref", "reward", "reward_model", "rollout", "teacher")
WITHOUT_MODEL = ("environment", "reward")
ADDRESS = (
    "host:port of a running Ray cluster, auto, or local; unset: RAY_ADDRESS, else a cluster on this machine, else a "
    "new one that ends with the run"
)
PROCESSES = (
    "ranks of every role; 1 with backend=local runs in the calling process; 1 with several GPUs or nodes means one "
    "for each GPU or node"
)
GPUS = (
    "GPUs to reserve on each node: for each process one, or the number in devices of its pool; a list has a number for "
    "each node, as [8, 8, 4, 0]; 0: none"
)
DEVICES = (
    "GPUs of each process: several only for a rollout engine that computes on several; less than 1: a share of a GPU, "
    "which processes of other pools may share; in a pool of only environment and reward: processors"
)
PLACEMENT = (
    f"pools of processes by name, each {{processes: , devices: , roles: [{', '.join(ROLES)}]}}; roles in no pool go to "
    "the first one, environment and reward to the process of the loop; empty: one pool of cluster.processes processes "
    "for all roles"
)


class HasDevices:
    """Base class: each process gets `devices` devices. A number below 1 is a share of one device."""

    devices: float

    @property
    def num_devices(self) -> int:
        """The number of devices that a process sees."""
        return math.ceil(self.devices)

    @property
    def share(self) -> float:
        """The share of each device that a process may use."""
        return min(1.0, self.devices)


class PoolConfig(Section, HasDevices):
    """The config of a pool: processes that its roles share."""

    processes: PositiveInt = key(1, "processes of the pool: ranks of each of its roles")
    devices: PositiveInt | Annotated[float, Gt(0), Lt(1)] = key(1, DEVICES)
    roles: list[str] = key([], f"roles of the pool, from {', '.join(ROLES)}")


@dataclass(frozen=True)
class ResourcePool(HasDevices):
    """A pool of processes. Each hosts one rank of every role of the pool."""

    processes: int = 1
    roles: tuple[str, ...] = ()  # empty: the only pool, which hosts all roles
    name: str = "main"
    devices: float = 1
    needs_device: bool = True  # False: it computes on processors only, and `devices` is their number

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ConfigError(f"pool {self.name}: processes", self.processes, "at least 1", "set cluster.processes")


@dataclass(frozen=True)
class Slot:
    """The node of a rank, and its devices there."""

    pool: ResourcePool
    rank: int
    node: int
    devices: tuple[int, ...] = ()  # their numbers on the node; empty if the rank computes on processors only
    is_first: bool = True  # False if an earlier rank has a share of the same device


class ClusterConfig(Section):
    """Processes, nodes and pools of the roles."""

    backend: Literal["local", "ray"] = key("local", "local: processes on this machine; ray: actors on a Ray cluster")
    address: str | None = key(None, ADDRESS)
    nnodes: PositiveInt = key(1, "Ray nodes")
    n_gpus_per_node: NonNegativeInt | list[NonNegativeInt] = key(0, GPUS)
    processes: PositiveInt = key(1, PROCESSES)
    placement: dict[str, PoolConfig] = key({}, PLACEMENT)
    deadline_seconds: PositiveFloat = key(1800.0, "longest wait for one call of a worker, in seconds")

    @model_validator(mode="before")
    @classmethod
    def _one_process_a_device(cls, values: object) -> object:
        match values:
            case dict() if values.get("processes", 1) == 1 and not values.get("placement"):
                nodes, gpus = values.get("nnodes", 1), values.get("n_gpus_per_node", 0)
                if type(nodes) is not int:
                    return values
                given = gpus if isinstance(gpus, list) else [gpus] * nodes
                if all(type(each) is int for each in given) and max(sum(given), nodes) > 1:
                    return {**values, "processes": sum(given) or nodes}
        return values

    @property
    def pools(self) -> dict[str, PoolConfig]:
        """The pools by name; the first hosts every role that no pool lists."""
        return self.placement or {"main": PoolConfig(processes=self.processes)}

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPUs to reserve on each node."""
        given = self.n_gpus_per_node
        return tuple(given) if isinstance(given, list) else (given,) * self.nnodes

    @property
    def devices(self) -> int:
        """The number of devices of all pools. On Ray without GPUs, shares of the nodes' processors count as devices."""
        return devices_of(ranks_of(self._counted(self.resources))).total()

    @property
    def devices_here(self) -> int:
        """The number of devices of the node that has the most."""
        return max(devices_of(self.slots()).values())

    def needs_device(self, pool: str) -> bool:
        """Tells whether the processes of a pool compute on devices; the first pool always does."""
        return pool == next(iter(self.pools)) or not {*self.pools[pool].roles} <= {*WITHOUT_MODEL}

    @property
    def resources(self) -> list[ResourcePool]:
        """The pools with the roles that they list."""
        return [
            ResourcePool(each.processes, tuple(each.roles), name, each.devices, self.needs_device(name))
            for name, each in self.pools.items()
        ]

    def slots(self, pools: Iterable[ResourcePool] | None = None) -> list[Slot]:
        """The slots of the ranks of `pools`, by default of all.  Raises: ConfigError if the nodes lack devices."""
        counted = self._counted(self.resources if pools is None else pools)
        here = -(-devices_of(ranks_of(counted)).total() // self.nnodes)
        return ranks_of(counted, self.gpus if any(self.gpus) else [here] * self.nnodes)

    def _counted(self, pools: Iterable[ResourcePool]) -> list[ResourcePool]:
        """The pools with the devices to reserve. On Ray without GPUs these are shares of a node's processors."""
        alike = self.backend == "ray" and not any(self.gpus)
        return [replace(pool, needs_device=True) if alike else pool for pool in pools]

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
        """The number of rollout ranks that share one engine with these `options`. They have consecutive numbers."""
        return max(1, self.replica_devices(options) // self.pools[self.pool_of("rollout")].num_devices)

    def replica_devices(self, options: Mapping[str, object]) -> int:
        """The number of devices that one rollout engine with these `options` uses."""
        size, server = options.get("tensor_parallel_size"), options.get("server")
        own = size if isinstance(size, int) else self.pools[self.pool_of("rollout")].num_devices
        names = ("pipeline_parallel_size", "pp_size")  # of vLLM's and SGLang's arguments
        stages = [server.get(name) for name in names] if isinstance(server, Mapping) else []
        return max(1, own * prod(each for each in stages if isinstance(each, int)))

    def processes_key(self, role: str) -> str:
        """The config key that sets the number of ranks of a role."""
        return f"cluster.placement.{self.pool_of(role)}.processes" if self.placement else "cluster.processes"


def ranks_of(pools: Iterable[ResourcePool], nodes: Sequence[int] | None = None) -> list[Slot]:
    """Returns the slots of all ranks by pool. `nodes` has the number of devices of each node; None: a node with enough.

    A rank gets the first free devices of one node. A rank with a share of a device gets the first device with enough
    left and no rank of its pool. A rank without devices gets the node with the fewest ranks, preferably a node without
    devices.  Raises: ConfigError."""
    free = [[1.0] * number for number in nodes or [0]]
    slots: list[Slot] = []
    for pool in pools:
        number, size = pool.num_devices, pool.share - 1e-6
        fits = (
            (node, first)
            for node, own in enumerate(free)
            for first in range(len(own) - number + 1)
            if min(own[first : first + number]) >= size
        )
        for rank in range(pool.processes):
            if not pool.needs_device:
                slots.append(Slot(pool, rank, _emptiest(free, slots)))
                continue
            found = next(fits, None)
            if found is None and nodes is None:
                found = 0, len(free[0])
                free[0] += [1.0] * number
            if found is None:
                sizes = ", ".join(map(str, nodes or ()))
                expected = f"{number} free on one node, for rank {rank} of {pool.processes}; the nodes have {sizes}"
                change = "list the pools with the most devices first, or change devices or the nodes"
                raise ConfigError(f"cluster.placement.{pool.name}.devices", pool.devices, expected, change)
            node, first = found
            taken = range(first, first + number)
            slots.append(Slot(pool, rank, node, tuple(taken), free[node][first] == 1.0))
            for device in taken:
                free[node][device] -= pool.share
    return slots


def _emptiest(free: list[list[float]], slots: list[Slot]) -> int:
    """The node with the fewest ranks. Nodes without devices come first, if there are any."""
    ranks = Counter(slot.node for slot in slots)
    return min((node for node, own in enumerate(free) if not own or all(free)), key=lambda node: ranks[node])


def devices_of(slots: Iterable[Slot]) -> Counter[int]:
    """Counts the devices that the ranks use on each node."""
    return Counter(node for node, _ in {(slot.node, device) for slot in slots for device in slot.devices})


def processors_of(slots: Iterable[Slot]) -> Counter[int]:
    """Counts the processors that the ranks need on each node."""
    return Counter(slot.node for slot in slots for _ in range(slot.pool.num_devices))
