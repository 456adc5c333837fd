# SPDX-License-Identifier: Apache-2.0
"""The connection to a Ray cluster, and the nodes that a launch is given."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.utils import read_ray_address
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from whet.config.cluster import ClusterConfig
from whet.controller.ray.watch import silence
from whet.errors import ConfigError, DeadlineError, WorkerError
from whet.processes.background import within

log = logging.getLogger(__name__)
CONNECT_SECONDS = 5.0  # for a machine to answer at all
SHUTDOWN_SECONDS = 10.0  # for Ray to let go in, where its head may be gone
PATIENCE_SECONDS = 5.0  # before a wait for nodes is spoken of
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    id: str
    address: str
    port: int  # of its raylet
    total: Mapping[str, float] = field(hash=False)  # resources
    is_alive: bool = True

    def __str__(self) -> str:
        kinds = (f"{self.total.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
        return f"{self.address} ({', '.join(kinds)})"


@dataclass(frozen=True)
class Reservation:
    """A share of the cluster, and how it is divided."""

    name: str  # no other launch has it
    group: PlacementGroup
    processes_here: int  # on each node
    cpus: float  # of a process
    gpus: float


@contextmanager
def connected(cluster: ClusterConfig) -> Iterator[bool]:
    """A connection to the cluster that the config names, or that is there, or to one that is started; both end with the
    block if it made them. Gives whether the cluster was started for the run, so that no node can join.

    Raises: ConfigError where there is none at the address."""
    if ray.is_initialized():
        yield False
        return
    named = cluster.address or os.environ.get("RAY_ADDRESS")
    address = named or read_ray_address() or "local"
    if address not in ("auto", "local") and (silence := _silence(address)) is not None:
        if named:
            raise ConfigError(
                f"no Ray cluster answers at {address} ({silence}); start one there (`ray start --head`), correct "
                "cluster.address or RAY_ADDRESS, or set cluster.address=local to have one started for the run"
            )
        address = "local"  # what Ray remembers is gone
    with _signals_kept():
        try:
            context: Any = ray.init(address, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"the Ray cluster at {address} cannot be used: {error}; `ray status` says whether it runs, "
                "cluster.address=local has one started for the run"
            ) from error
    try:
        log.info("Ray at %s: %s", context.address_info["gcs_address"], "; ".join(map(str, alive_nodes())))
        if context.dashboard_url:
            log.info("Ray's dashboard: http://%s", context.dashboard_url)
        yield address == "local"
    finally:
        attempt(SHUTDOWN_SECONDS, ray.shutdown)


def alive_nodes() -> list[Node]:
    """The machines of the cluster."""
    return [node for node in all_nodes() if node.is_alive]


def all_nodes() -> list[Node]:
    """The machines of the cluster and those that are gone, by address."""
    nodes = [
        Node(each["NodeID"], each["NodeManagerAddress"], each["NodeManagerPort"], each["Resources"], each["Alive"])
        for each in ray.nodes()
    ]
    return sorted(nodes, key=lambda node: (node.address, node.id))


def reserve(processes: int, cluster: ClusterConfig, *, is_alone: bool) -> Reservation:
    """A place for so many processes, as many on each of `cluster.nnodes` nodes, where none can join if it `is_alone`.

    A node with fewer CPUs than processes is shared evenly. Nodes that are not there, or not free, are waited for: an
    autoscaler may add them.  Raises: ConfigError where none can come; WorkerError at the deadline."""
    here, gpus, count = processes // cluster.nnodes, cluster.n_gpus_per_node, cluster.nnodes
    fitting = sorted(
        (node.total.get("CPU", 0.0) for node in alive_nodes() if node.total.get("GPU", 0.0) >= gpus), reverse=True
    )
    enough = len(fitting) >= count and fitting[count - 1] > 0
    cpus = min(float(here), fitting[count - 1]) if enough else float(here)
    wanted = f"{count} node{'s' * (count > 1)} with {cpus:g} CPUs" + (f" and {gpus} GPUs" if gpus else "")
    there = f"the Ray cluster has {'; '.join(map(str, alive_nodes()))}"
    advice = "add nodes (`ray start --address=...`), or lower cluster.nnodes and cluster.n_gpus_per_node"
    if not enough and is_alone:
        raise ConfigError(f"the run asks for {wanted}, and {there}; {advice}")
    bundle = {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {})}
    name = f"whet-{uuid.uuid4().hex}"
    group = placement_group([bundle] * count, strategy="STRICT_SPREAD", name=name)
    began, is_told = time.monotonic(), False
    while not group.wait(LOOK_SECONDS):
        free = {kind: number for kind, number in ray.available_resources().items() if kind in ("CPU", "GPU")}
        waited = time.monotonic() - began
        if waited > PATIENCE_SECONDS and not is_told:
            log.warning("waiting for %s; %s, and %s of all that is free; %s", wanted, there, free, advice)
            is_told = True
        if waited > cluster.deadline_seconds:
            remove_placement_group(group)
            raise WorkerError(
                f"{wanted} were not free within {cluster.deadline_seconds:g} s: {there}, and {free} of all that is "
                f"free (`ray status` shows who uses the rest); {advice}"
            )
    return Reservation(name, group, here, cpus / here, 1.0 if gpus else 0.0)


def head_address() -> tuple[str, int]:
    """Returns the address at which the control store of the cluster listens."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return host.strip("[]"), int(port)


def attempt(seconds: float, action: Callable[[], Any]) -> None:
    """Does something that may fail, and does not wait longer than this: without its head Ray waits for a minute."""
    with contextlib.suppress(DeadlineError, RayError, RuntimeError, ValueError):
        within(seconds, action, "")


def _silence(address: str) -> OSError | None:
    """Returns why nothing answers at host:port: Ray itself tries for half a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"cluster.address={address} is no address; write host:port, auto or local")
    return silence(host.strip("[]"), int(port), CONNECT_SECONDS)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM to itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
