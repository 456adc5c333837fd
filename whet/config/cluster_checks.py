# SPDX-License-Identifier: Apache-2.0
"""Settings of the cluster that do not go together."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from whet.config.cluster import ROLES, ClusterConfig
from whet.config.schema import SFTConfig, TrainConfig
from whet.errors import ConfigError, pip_install


def cluster_checks(config: TrainConfig | SFTConfig) -> list[Callable[[], object]]:
    """Checks of `whet.config.checks` that are about where roles run."""
    cluster = config.cluster
    checks: list[Callable[[], object]] = [
        partial(_check_backend, cluster),
        partial(_check_nodes, cluster),
        partial(_check_pools, cluster),
        partial(_check_processes, config),
    ]
    return [*checks, partial(_check_neighbours, config)] if isinstance(config, TrainConfig) else checks


def _check_backend(cluster: ClusterConfig) -> None:
    if cluster.backend == "local":
        for key, value in (("address", cluster.address), ("nnodes", cluster.nnodes if cluster.nnodes > 1 else None)):
            if value is not None:
                raise ConfigError(
                    f"cluster.{key}={value} is of a Ray cluster, and cluster.backend is local: this machine alone; set "
                    "cluster.backend=ray, or unset it"
                )
    elif find_spec("ray") is None:
        raise ConfigError(f"cluster.backend=ray, and Ray is not installed; run {pip_install('ray')}")
    if cluster.address is not None and "://" in cluster.address:
        raise ConfigError(
            f"cluster.address={cluster.address} is of Ray's client, which would carry every batch through one server; "
            "start whet on a node of the cluster (`ray job submit -- whet train ...`), with host:port or no address"
        )


def _check_nodes(cluster: ClusterConfig) -> None:
    total, nodes, gpus = cluster.world_size, cluster.nnodes, cluster.n_gpus_per_node
    what = "the pools of cluster.placement have" if cluster.placement else "cluster.processes asks for"
    if gpus > 0 and total != nodes * gpus:
        raise ConfigError(
            f"{what} {total} processes, one a GPU, and cluster.nnodes={nodes} with cluster.n_gpus_per_node={gpus} make "
            f"{nodes * gpus} GPUs; make the two equal"
        )
    if total % nodes:
        raise ConfigError(
            f"{what} {total} processes, which cluster.nnodes={nodes} does not divide; try "
            f"{total - total % nodes or nodes} or {total + nodes - total % nodes}"
        )


def _check_pools(cluster: ClusterConfig) -> None:
    if cluster.placement and cluster.processes > 1:
        raise ConfigError(
            f"cluster.processes={cluster.processes} is for one pool of all roles, and cluster.placement names pools "
            "with processes of their own; unset one of them"
        )
    owners: dict[str, str] = {}
    for number, (name, pool) in enumerate(cluster.placement.items()):
        if not pool.roles and number > 0:
            raise ConfigError(
                f"cluster.placement.{name}.roles is empty, and roles that no pool names go to the first one, "
                f"{next(iter(cluster.placement))}; name some of {', '.join(ROLES)}, or take the pool out"
            )
        for role in pool.roles:
            if role not in ROLES:
                near = difflib.get_close_matches(role, ROLES, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ConfigError(f"cluster.placement.{name}.roles has {role!r}; {hint}There are {', '.join(ROLES)}")
            if role in owners:
                raise ConfigError(
                    f"cluster.placement names the role {role} in {owners[role]} and in {name}; a role is in one pool"
                )
            owners[role] = name


def _check_processes(config: TrainConfig | SFTConfig) -> None:
    """Every training rank has a row of every optimizer step."""
    cluster = config.cluster
    if isinstance(config, SFTConfig):
        rows = {"actor": (config.data.train_batch_size, "data.train_batch_size")}
    else:
        rows = {
            role: (
                (config[role].mini_batch_size or config.data.train_batch_size) * config.rollout.n,
                "mini-batch prompts x rollout.n",
            )
            for role in ("actor", "critic")
        }
    for role, (count, what) in rows.items():
        if cluster.processes_of(role) > count:
            key = f"cluster.placement.{cluster.pool_of(role)}.processes" if cluster.placement else "cluster.processes"
            raise ConfigError(
                f"{key}={cluster.processes_of(role)} is more than the {count} rows of an optimizer step ({what}); "
                f"set it to {count} or less"
            )


def _check_neighbours(config: TrainConfig) -> None:
    """An adapter's reference is the actor's own module."""
    cluster = config.cluster
    is_start = config.model.lora.rank is not None and config.ref.model_path is None
    if is_start and cluster.pool_of("ref") != cluster.pool_of("actor"):
        raise ConfigError(
            f"cluster.placement puts ref into {cluster.pool_of('ref')} and actor into {cluster.pool_of('actor')}, and "
            "with model.lora.rank the reference is the actor's own model without its adapter; put both into one pool, "
            "or set ref.model_path to have it loaded apart"
        )
