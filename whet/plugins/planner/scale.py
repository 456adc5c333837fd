# SPDX-License-Identifier: Apache-2.0
"""Plans a config for other numbers of accelerators: finds the mesh that fits with the least communication, by the
formulas of `first`, and the node and devices of every rank. It starts no process, and makes no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product

from whet.config.cluster import PoolConfig
from whet.config.schema import RunConfig
from whet.engines.mesh import FORMER
from whet.errors import ConfigError
from whet.plugins.planner.first import bytes_of, changed, host_bytes, mesh_of, section_of

PARTS = (1, 2, 4, 8)  # numbers of ranks that compute a row together, tried in this order
OF_A_NODE = 8  # accelerators, where the config has no number


@dataclass(frozen=True)
class Scaled:
    """A config for a number of accelerators: its changes, the memory that it needs, its mesh and pools."""

    gpus: int
    changes: Mapping[str, object]  # of the config, by key
    needed: int  # bytes of the fullest accelerator
    offloaded: int  # bytes of offloaded tensors on the host of a node
    fits: bool

    mesh: str
    pools: str

    @property
    def words(self) -> str:
        """The changes, as arguments of a command."""
        return " ".join(f"{key}={_word(value)}" for key, value in self.changes.items())


@dataclass(frozen=True)
class Place:
    """The node and devices of a rank, and its coordinates in the mesh."""

    pool: str
    rank: int
    node: int
    devices: tuple[int, ...]  # numbers on the node
    share: float  # of each
    roles: tuple[str, ...]
    at: Mapping[str, int]  # coordinates in the mesh, where the pool trains with one


def scale(
    config: RunConfig, shape: Mapping[str, float], counts: Sequence[int], gib: float, host_gib: float | None = None
) -> list[Scaled]:
    """Returns a plan for each number of accelerators with `gib` of memory: the first candidate that fits, else the one
    that needs least. With `host_gib` the offloaded tensors must fit into a node of that memory too.

    Raises: ConfigError for a number that the pools of the config cannot share."""
    return [_best(config, shape, count, gib, host_gib) for count in counts]


def smallest(
    config: RunConfig, shape: Mapping[str, float], gib: float, most: int, host_gib: float | None = None
) -> Scaled | None:
    """Plans for the smallest number of accelerators that fits, up to `most`: a part of a node, or whole nodes."""
    for count in (1, 2, 4, *range(OF_A_NODE, most + 1, OF_A_NODE)):
        try:
            found = _best(config, shape, count, gib, host_gib)
        except ConfigError:
            continue
        if found.fits:
            return found
    return None


def _best(config: RunConfig, shape: Mapping[str, float], gpus: int, gib: float, host_gib: float | None) -> Scaled:
    best: Scaled | None = None
    for changes in _candidates(config, shape, gpus):
        other = changed(config, changes)
        needed = bytes_of(other, shape, True, gib)
        offloaded = host_bytes(other, shape)
        fits = needed <= gib * 2**30 and (host_gib is None or offloaded <= host_gib * 2**30)
        sizes, pools = asdict(mesh_of(other, "actor")).items(), other.cluster.pools.items()
        mesh = " ".join(f"{name}={size}" for name, size in sizes if size > 1)
        shown = ", ".join(f"{name} {pool.processes} x {pool.devices}" for name, pool in pools)
        found = Scaled(gpus, changes, needed, offloaded, fits, mesh, shown)
        if found.fits:
            return found
        if best is None or needed < best.needed:
            best = found
    if best is None:
        expected = f"a number that the pools can divide in the same proportions as {config.cluster.devices}"
        raise ConfigError("--gpus", gpus, expected, "name another, or change cluster.placement")
    return best


def _candidates(config: RunConfig, shape: Mapping[str, float], gpus: int) -> Iterator[dict[str, object]]:
    """Yields changes of the config for a number of accelerators, in order of increasing communication."""
    role, prefix = section_of(config, "actor")
    here = min(gpus, max(config.cluster.gpus) or OF_A_NODE)
    nodes: dict[str, object] = {"cluster.nnodes": gpus // here, "cluster.n_gpus_per_node": here}
    if gpus > here:
        nodes["cluster.backend"] = "ray"
    elif config.cluster.nnodes == 1:
        nodes = {}
    if gpus % here:
        return
    if gpus == config.cluster.devices:
        yield {}  # as it is
    experts = [1] + [size for size in (8, 16, 32, 64) if shape["experts"] > 1 and shape["experts"] % size == 0]
    for row_ranks, expert, devices in product(PARTS, experts, PARTS):
        pools = _pools(config, gpus, devices)
        if pools is None:
            continue
        trained = pools[config.cluster.pool_of("actor")]
        for tensor in (size for size in PARTS if row_ranks % size == 0):
            context, holders = row_ranks // tensor, trained.processes // tensor
            if trained.processes % row_ranks or holders % expert or shape["heads_of_keys"] % tensor:
                continue
            sizes = {"context": context, "tensor": tensor, "expert": expert}
            mesh = {name: size for name, size in sizes.items() if size > 1}
            changes: dict[str, object] = {**nodes, "cluster.processes": gpus}
            if config.cluster.placement:
                changes = {**nodes, "cluster.placement": {name: pool.model_dump() for name, pool in pools.items()}}
            if trained.processes > 1:
                kept = {name: value for name, value in role.engine.options.items() if name not in (*FORMER, "mesh")}
                options = {**kept, "mesh": mesh} if mesh else kept
                changes |= {f"{prefix}engine.name": "fsdp", f"{prefix}engine.options": options}
            yield changes


def _pools(config: RunConfig, gpus: int, devices: int) -> dict[str, PoolConfig] | None:
    """Scales the pools to another number of accelerators, in the config's proportions. In a separate rollout pool each
    rollout engine gets `devices`. Returns None if the pools cannot divide the number in these proportions."""
    if not config.cluster.placement:
        return {"main": PoolConfig(processes=gpus)} if devices == 1 else None
    pools, is_asked = dict[str, PoolConfig](), devices == 1
    for name, pool in config.cluster.placement.items():
        if not config.cluster.needs_device(name):
            pools[name] = pool
            continue
        here, rest = divmod(pool.processes * pool.num_devices * gpus, config.cluster.devices)
        each = min(1, pool.devices)
        if config.trains_on == "prompts" and pool.roles == ["rollout"] and each == 1:
            each, is_asked = devices, True
        if rest or not here or here % max(1, each):
            return None
        pools[name] = pool.model_copy(update={"processes": int(here // max(1, each)), "devices": each})
    return pools if is_asked else None


def places(config: RunConfig) -> Iterator[Place]:
    """Yields the node, the devices and the mesh coordinates of every rank in a run."""
    role = section_of(config, "actor")[0]
    actors = None if role.engine.name == "single" else config.cluster.pool_of("actor")
    mesh = mesh_of(config, "actor")
    for slot in config.cluster.slots():
        pool = slot.pool
        at = mesh.at(slot.rank) if pool.name == actors else {}
        yield Place(pool.name, slot.rank, slot.node, slot.devices, pool.share, pool.roles or ("all roles",), at)


def _word(value: object) -> str:
    """Writes a value in Hydra's syntax."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_word(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_word, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
