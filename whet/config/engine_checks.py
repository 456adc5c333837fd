# SPDX-License-Identifier: Apache-2.0
"""Rules about training engines, the processes that they need, and the cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from whet.config.cluster import ROLES, ClusterConfig
from whet.config.schema import EngineConfig, ExamplesConfig, ModelConfig, OptimConfig, TrainConfig
from whet.config.section import Place, entry_at
from whet.errors import did_you_mean, pip_install
from whet.registry import ENGINES, load_target


@dataclass(frozen=True)
class EngineUse:
    """The settings of a role's engine: the argument of the check that an engine registers as `check=`.

    That function returns one line for each error. Its module is imported when a config is loaded, so it must not load
    torch."""

    key: str  # actor.engine
    engine: EngineConfig
    options: Mapping[str, Any]  # with defaults
    model: ModelConfig
    optim: OptimConfig | None
    optim_key: str
    processes: int
    processes_key: str


def engine_rule(engine: EngineConfig, at: Place) -> Iterator[str]:
    """Checks the settings of an engine: the rules of all engines, then those that the engine registered."""
    cluster: ClusterConfig = at.whole["cluster"]
    prefix = at.key.removesuffix("engine")
    role = prefix.removesuffix(".") or "actor"
    entry = entry_at(ENGINES, at.of("name"), engine.name)
    use = EngineUse(
        at.key,
        engine,
        entry.resolve_options(engine.options, at.of("options")),
        at.whole["model"],
        at.parent.get("optim"),
        f"{prefix}optim",
        cluster.processes_of(role),
        cluster.processes_key(role),
    )
    rounding = None if use.optim is None else use.optim.weight_rounding
    if rounding is not None and use.model.dtype == "float32":
        yield (
            f"{use.optim_key}.weight_rounding={rounding} keeps weights in bfloat16, but model.dtype is float32 "
            "(auto is, on a machine that does not multiply bfloat16); set model.dtype=bfloat16"
        )
    config, is_other = at.whole, role == "actor" and engine.name != "single"
    if is_other and isinstance(config, TrainConfig) and config.rollout.engine.options.get("batch_invariant") is True:
        yield (
            f"{at.key}.name={engine.name} has other kernels than rollout.engine.options.batch_invariant=true asks of "
            "the trainer; set it to single, or unset batch_invariant"
        )
    if "check" in entry.marks:
        own: Callable[[EngineUse], Iterable[str]] = load_target(entry.marks["check"])
        yield from own(use)


def cluster_rule(cluster: ClusterConfig, at: Place) -> Iterator[str]:
    """Checks backend, nodes, GPUs and pools."""
    if cluster.backend == "local":
        for key, value in (("address", cluster.address), ("nnodes", cluster.nnodes if cluster.nnodes > 1 else None)):
            if value is not None:
                yield (
                    f"cluster.{key}={value} needs a Ray cluster, but cluster.backend is local; set "
                    f"cluster.backend=ray, or unset cluster.{key}"
                )
    elif find_spec("ray") is None:
        yield f"cluster.backend=ray, but Ray is not installed; run {pip_install('ray')}"
    if cluster.address is not None and "://" in cluster.address:
        yield (
            f"cluster.address={cluster.address} is an address of Ray's client, which would send every batch through "
            "one server; start whet on a node of the cluster (`ray job submit -- whet train ...`), with host:port or "
            "no address"
        )
    total, nodes, gpus = cluster.devices, cluster.nnodes, cluster.n_gpus_per_node
    what = "the pools of cluster.placement have" if cluster.placement else "cluster.processes sets"
    unit = "devices" if any(pool.devices > 1 for pool in cluster.pools.values()) else "processes"
    if gpus > 0 and total != nodes * gpus:
        yield (
            f"{what} {total} {unit}, but cluster.nnodes={nodes} x cluster.n_gpus_per_node={gpus} is {nodes * gpus} "
            "GPUs; a process has one GPU, or those in devices of its pool: make the two numbers equal"
        )
    elif total % nodes:
        yield (
            f"{what} {total} {unit}, which must be a multiple of cluster.nnodes={nodes}; try "
            f"{total - total % nodes or nodes} or {total + nodes - total % nodes}"
        )
    yield from _pools(cluster)


def _pools(cluster: ClusterConfig) -> Iterator[str]:
    if cluster.placement and cluster.processes > 1:
        yield (
            f"cluster.processes={cluster.processes} is the size of a single pool, but cluster.placement defines pools "
            "with sizes of their own; unset one of these two keys"
        )
    owners, first = dict[str, str](), 0
    for number, (name, pool) in enumerate(cluster.placement.items()):
        if not pool.roles and number > 0:
            yield (
                f"cluster.placement.{name}.roles is empty, and roles in no pool go to the first one, "
                f"{next(iter(cluster.placement))}; list some of {', '.join(ROLES)}, or remove the pool"
            )
        if pool.devices > 1 and pool.roles != ["rollout"]:
            yield (
                f"cluster.placement.{name}.devices={pool.devices} with the roles {', '.join(pool.roles) or 'all'}; a "
                "training engine computes on one device a process: set devices to 1, or give the rollout a pool of its "
                "own"
            )
        here, last = cluster.devices_here, first + pool.processes * pool.devices
        if any(start // here != (start + pool.devices - 1) // here for start in range(first, last, pool.devices)):
            yield (
                f"cluster.placement.{name}.devices={pool.devices} puts a process on two nodes of {here} devices; "
                "expected all of its devices on one: name this pool first, or change devices or cluster.nnodes"
            )
        first = last
        for role in pool.roles:
            if role not in ROLES:
                hint = did_you_mean(role, ROLES, quoted=False)
                known = f"{', '.join(ROLES)}{hint and f' ({hint})'}"
                yield f"cluster.placement.{name}.roles has {role!r}; expected one of {known}"
            elif role in owners:
                yield f"cluster.placement has the role {role} in the pools {owners[role]} and {name}; expected one pool"
            owners[role] = name


def processes_rule(cluster: ClusterConfig, at: Place) -> Iterator[str]:
    """Requires at least one row of every optimizer step for every training rank."""
    config, what = at.whole, "mini-batch prompts x rollout.n"
    if isinstance(config, ExamplesConfig):
        rows, what = {"actor": config.data.train_batch_size}, "data.train_batch_size"
    elif isinstance(config, TrainConfig):
        prompts, n = config.data.train_batch_size, config.rollout.n
        rows = {role: (config[role].mini_batch_size or prompts) * n for role in ("actor", "critic")}
    for role, count in rows.items():
        if cluster.processes_of(role) > count:
            yield (
                f"{cluster.processes_key(role)}={cluster.processes_of(role)} is more than the {count} rows of an "
                f"optimizer step ({what}); set it to {count} or less"
            )


def neighbours_rule(cluster: ClusterConfig, at: Place) -> Iterator[str]:
    """Requires actor and reference in one pool where the reference is the actor's model without its adapter."""
    config = at.whole
    if not isinstance(config, TrainConfig) or config.model.lora.rank is None or config.ref.model_path is not None:
        return
    if cluster.pool_of("ref") != cluster.pool_of("actor"):
        yield (
            f"cluster.placement has ref in pool {cluster.pool_of('ref')} and actor in pool {cluster.pool_of('actor')}, "
            "but with model.lora.rank the reference is the actor's model without its adapter; put both into one pool, "
            "or set ref.model_path to load a separate reference"
        )
