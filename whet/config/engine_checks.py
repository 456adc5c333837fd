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
from whet.errors import ConfigError, did_you_mean, pip_install
from whet.registry import ENGINES, load_target


@dataclass(frozen=True)
class EngineUse:
    """The settings of a role's engine: the argument of `refuses`, which an engine's class has."""

    key: str  # actor.engine
    engine: EngineConfig
    options: Mapping[str, Any]  # with defaults
    model: ModelConfig
    optim: OptimConfig | None
    optim_key: str
    processes: int
    processes_key: str
    batch_invariant: bool  # trains with the kernels of a rollout that is
    media: str = ""  # the name of a row with images or videos, where there is one; unset before data is read

    @classmethod
    def at(cls, place: Place, media: str = "") -> EngineUse:
        """The use of the engine in a section of a config.  Raises: ConfigError for an unknown engine or option."""
        config, engine, cluster = place.whole, place.parent["engine"], place.whole["cluster"]
        options = entry_at(ENGINES, place.of("name"), engine.name).resolve_options(engine.options, place.of("options"))
        prefix = place.key.removesuffix("engine")
        role, optim = prefix.removesuffix(".") or "actor", (place.parent.get("optim"), f"{prefix}optim")
        processes = cluster.processes_of(role), cluster.processes_key(role)
        rollout = config["rollout"].engine.options if role == "actor" and isinstance(config, TrainConfig) else {}
        invariant = rollout.get("batch_invariant") is True
        return cls(place.key, engine, options, config["model"], *optim, *processes, invariant, media)

    def refused(self) -> Iterable[ConfigError]:
        """The errors that `refuses` of the engine's class returns. A shipped engine that refuses something names the
        function with its registration, in a module that loads no torch."""
        entry = ENGINES[self.engine.name]
        if entry.function is None and "refuses" not in entry.marks:
            return ()
        target = entry.marks.get("refuses", f"{entry.target}.refuses")
        refuses: Callable[[EngineUse], Iterable[ConfigError]] = load_target(target)
        return refuses(self)


def other_kernels(use: EngineUse) -> Iterator[ConfigError]:
    """Yields the error of an engine without the kernels of a rollout that is batch-invariant."""
    if use.batch_invariant:
        expected = "single with rollout.engine.options.batch_invariant=true, as others have other kernels"
        yield ConfigError(f"{use.key}.name", use.engine.name, expected, "set it to single, or unset batch_invariant")


def engine_rule(engine: EngineConfig, at: Place) -> Iterator[ConfigError]:
    """Checks the settings of an engine: the rules of all engines, then what the engine refuses."""
    use = EngineUse.at(at)
    rounding = None if use.optim is None else use.optim.weight_rounding
    if rounding is not None and use.model.dtype == "float32":
        expected = "no value with model.dtype=float32 (auto is, on a machine that does not multiply bfloat16)"
        change = "set model.dtype=bfloat16, in which it keeps the weights"
        yield ConfigError(f"{use.optim_key}.weight_rounding", rounding, expected, change)
    yield from use.refused()


def cluster_rule(cluster: ClusterConfig, at: Place) -> Iterator[ConfigError]:
    """Checks backend, nodes, GPUs and pools."""
    if cluster.backend == "local":
        for key, value in (("address", cluster.address), ("nnodes", cluster.nnodes if cluster.nnodes > 1 else None)):
            if value is not None:
                change = f"set cluster.backend=ray, or unset cluster.{key}"
                yield ConfigError(f"cluster.{key}", value, "no value with cluster.backend=local: it needs Ray", change)
    elif find_spec("ray") is None:
        yield ConfigError("cluster.backend", cluster.backend, "an installation of Ray", f"run {pip_install('ray')}")
    if cluster.address is not None and "://" in cluster.address:
        expected = "host:port, or no address; Ray's client would send every batch through one server"
        change = "start whet on a node of the cluster (`ray job submit -- whet train ...`)"
        yield ConfigError("cluster.address", cluster.address, expected, change)
    total, nodes, gpus = cluster.devices, cluster.nnodes, cluster.n_gpus_per_node
    unit = "devices" if any(pool.devices > 1 for pool in cluster.pools.values()) else "processes"
    key, found = ("cluster.placement", f"{total} {unit}") if cluster.placement else ("cluster.processes", total)
    if gpus > 0 and total != nodes * gpus:
        expected = (
            f"{nodes * gpus}, the GPUs of cluster.nnodes={nodes} x cluster.n_gpus_per_node={gpus}; a process has one "
            "GPU, or those in devices of its pool"
        )
        yield ConfigError(key, found, expected, "make the two numbers equal")
    elif total % nodes:
        near = f"{total - total % nodes or nodes} or {total + nodes - total % nodes}"
        yield ConfigError(key, found, f"a multiple of cluster.nnodes={nodes}", f"try {near}")
    yield from _pools(cluster)


def _pools(cluster: ClusterConfig) -> Iterator[ConfigError]:
    if cluster.placement and cluster.processes > 1:
        expected = "no value with cluster.placement, whose pools have sizes of their own"
        yield ConfigError("cluster.processes", cluster.processes, expected, "unset one of the two keys")
    owners, first = dict[str, str](), 0
    for number, (name, pool) in enumerate(cluster.placement.items()):
        key = f"cluster.placement.{name}"
        if not pool.roles and number > 0:
            expected = f"some of {', '.join(ROLES)}: roles in no pool go to the first, {next(iter(cluster.placement))}"
            yield ConfigError(f"{key}.roles", [], expected, "list some, or remove the pool")
        if pool.devices > 1 and pool.roles != ["rollout"]:
            expected = f"1 with the roles {', '.join(pool.roles) or 'all'}: a training engine computes on one device"
            yield ConfigError(f"{key}.devices", pool.devices, expected, "lower it, or give the rollout a separate pool")
        here, last = cluster.devices_here, first + pool.processes * pool.devices
        if any(start // here != (start + pool.devices - 1) // here for start in range(first, last, pool.devices)):
            expected = f"all devices of a process on one node, which has {here}"
            change = "name this pool first, or change devices or cluster.nnodes"
            yield ConfigError(f"{key}.devices", pool.devices, expected, change)
        first = last
        for role in pool.roles:
            if role not in ROLES:
                hint = did_you_mean(role, ROLES, "correct the name", quoted=False)
                yield ConfigError(f"{key}.roles", role, f"one of {', '.join(ROLES)}", hint)
            elif role in owners:
                expected = f"each role in one pool, and pool {owners[role]} has it too"
                yield ConfigError(f"{key}.roles", role, expected, "remove it from one")
            owners[role] = name


def processes_rule(cluster: ClusterConfig, at: Place) -> Iterator[ConfigError]:
    """Requires at least one row of every optimizer step for every training rank."""
    config, what = at.whole, "mini-batch prompts x rollout.n"
    if isinstance(config, ExamplesConfig):
        rows, what = {"actor": config.data.train_batch_size}, "data.train_batch_size"
    elif isinstance(config, TrainConfig):
        prompts, n = config.data.train_batch_size, config.rollout.n
        rows = {role: (config[role].mini_batch_size or prompts) * n for role in ("actor", "critic")}
    for role, count in rows.items():
        if cluster.processes_of(role) > count:
            expected = f"at most {count}, the rows of an optimizer step ({what})"
            key, found = cluster.processes_key(role), cluster.processes_of(role)
            yield ConfigError(key, found, expected, f"set it to {count} or less")


def neighbours_rule(cluster: ClusterConfig, at: Place) -> Iterator[ConfigError]:
    """Requires actor and reference in one pool where the reference is the actor's model without its adapter."""
    config = at.whole
    if not isinstance(config, TrainConfig) or config.model.lora.rank is None or config.ref.model_path is not None:
        return
    ref, actor = cluster.pool_of("ref"), cluster.pool_of("actor")
    if ref != actor:
        expected = f"one pool for ref ({ref}) and actor ({actor}), as ref is the actor's model without its adapter"
        change = "put both into one pool, or set ref.model_path to load a separate reference"
        yield ConfigError("cluster.placement", "ref and actor are apart, with model.lora.rank", expected, change)
