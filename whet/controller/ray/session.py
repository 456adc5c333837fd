# SPDX-License-Identifier: Apache-2.0
"""The connection to a Ray cluster, and the reservation of nodes for a launch."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.utils import read_ray_address
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from whet.config.cluster import ClusterConfig, Slot, processors_of
from whet.controller.ray.watch import connection_error
from whet.errors import ConfigError, DeadlineError, WorkerError
from whet.processes.background import within

try:  # Ray 2.60, whose clusters ask for a token by default
    from ray._private.authentication.authentication_token_setup import (
        AuthenticationTokenLoader,
        Config,
        maybe_enable_token_auth_if_token_available as use_token_if_there_is_one,
    )

    HAS_TOKENS = True
except ImportError:
    HAS_TOKENS = False

log = logging.getLogger(__name__)
CONNECT_SECONDS = 5.0  # for a machine to accept a connection
SHUTDOWN_SECONDS = 10.0  # for ray.shutdown, because Ray's head may be lost
LOCAL = "set cluster.address=local to start one for the run"
QUIET_SECONDS = 5.0  # of waiting for nodes before a warning
CHECK_SECONDS = 0.5


@dataclass(frozen=True)
class Node:
    """A node of the Ray cluster: its id, address and resources."""

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
    """The nodes reserved for a launch. Each bundle of the placement group reserves one node."""

    name: str  # unique to the launch
    group: PlacementGroup
    cpus: float  # for each device of a process: 1, or less if a node has fewer CPUs than such devices


@contextmanager
def connected(cluster: ClusterConfig) -> Iterator[bool]:
    """Connects to the Ray cluster in the config, else to a running one; if none runs, starts one. Yields True if it
    started the cluster, which no other node can join. The end of the block disconnects, and ends a started cluster.

    Raises: ConfigError if no cluster runs at the address."""
    if ray.is_initialized():
        yield False
        return
    named = cluster.address or os.environ.get("RAY_ADDRESS")
    address = named or read_ray_address() or "local"
    if address not in ("auto", "local") and (failure := _connection_error(address)) is not None:
        if named:
            change = f"start one there (`ray start --head`), correct cluster.address or RAY_ADDRESS, or {LOCAL}"
            raise ConfigError(f"Ray cluster at {address}", f"no answer ({failure})", change=change)
        address = "local"  # the cluster that Ray remembers has ended
    with authenticated(starts=address == "local"):
        with _sigterm_handler_kept():
            try:
                context: Any = ray.init(address, logging_level=logging.WARNING)
            except (ConnectionError, RayError, RuntimeError, ValueError) as error:
                change = f"check it with `ray status`{_token_hint()}, or {LOCAL}"
                raise ConfigError(f"Ray cluster at {address}", f"cannot be used ({error})", change=change) from error
        try:
            log.info("Ray at %s: %s", context.address_info["gcs_address"], "; ".join(map(str, alive_nodes())))
            if context.dashboard_url:
                log.info("Ray's dashboard: http://%s", context.dashboard_url)
            yield address == "local"
        finally:
            attempt(SHUTDOWN_SECONDS, ray.shutdown)


@contextmanager
def authenticated(*, starts: bool) -> Iterator[None]:
    """Sends this machine's Ray token to a running cluster, which may require it; Ray does so only for the address auto.

    If the block `starts` a cluster and the machine has no token, the cluster gets a new one. Ray would write one to
    ~/.ray/auth_token, and every later `ray start --head` would require it of other nodes."""
    if not HAS_TOKENS:
        yield
        return
    before = {name: os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")}
    if not starts:
        use_token_if_there_is_one(warn_if_disabled=False)
    elif not _has_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        Config.initialize("")  # first: a thread of Ray's that is ending may ask for the token again
        AuthenticationTokenLoader.instance().reset_cache()


def _has_token() -> bool:
    return bool(AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))


def _token_hint() -> str:
    if not HAS_TOKENS or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return ""
    has = "the token of this machine must be the one" if _has_token() else "this machine has no token and needs the one"
    return f"; if it asks for a token, {has} of its head (~/.ray/auth_token there, or RAY_AUTH_TOKEN)"


def alive_nodes() -> list[Node]:
    """Lists the live machines of the cluster, by address."""
    return [node for node in all_nodes() if node.is_alive]


def all_nodes() -> list[Node]:
    """Lists the machines of the cluster, dead ones included, by address."""
    names = ("NodeID", "NodeManagerAddress", "NodeManagerPort", "Resources", "Alive")
    nodes = [Node(*(each[name] for name in names)) for each in ray.nodes()]
    return sorted(nodes, key=lambda node: (node.address, node.id))


def reserve(slots: Sequence[Slot], cluster: ClusterConfig, *, is_alone: bool) -> Reservation:
    """Reserves the resources of all ranks on the nodes of their slots. `is_alone`: no node can join the cluster.

    If a node has fewer CPUs than processes, each process gets a fraction. Waits for missing and busy nodes, because an
    autoscaler may add them.  Raises: ConfigError if a missing node cannot join; WorkerError at the deadline."""
    processors = processors_of(slots)
    each_node = [(gpus, processors[node]) for node, gpus in enumerate(cluster.gpus)]
    cpus = _cpus(each_node)
    bundles = [{"CPU": share * (cpus or 1.0), **({"GPU": float(gpus)} if gpus else {})} for gpus, share in each_node]
    wanted = "; ".join(
        f"{count} node{'s' * (count > 1)} with {own[0]:g} CPUs" + "".join(f" and {gpus:g} GPUs" for gpus in own[1:])
        for own, count in Counter(tuple(each.values()) for each in bundles).items()
    )
    there = "; ".join(map(str, alive_nodes()))
    advice = "add nodes (`ray start --address=...`), or lower cluster.nnodes and cluster.n_gpus_per_node"
    if cpus is None and is_alone:
        raise ConfigError("Ray cluster", there, wanted, advice)
    name = f"whet-{uuid.uuid4().hex}"
    group = placement_group(bundles, strategy="STRICT_SPREAD", name=name)
    began, has_warned = time.monotonic(), False
    while not group.wait(CHECK_SECONDS):
        free = {kind: number for kind, number in ray.available_resources().items() if kind in ("CPU", "GPU")}
        waited = time.monotonic() - began
        if waited > QUIET_SECONDS and not has_warned:
            log.warning("waiting for %s; Ray has %s, of which %s is free; %s", wanted, there, free, advice)
            has_warned = True
        if waited > cluster.deadline_seconds:
            remove_placement_group(group)
            found = f"{there}, of which {free} is free (`ray status` shows what uses the rest)"
            raise WorkerError("Ray cluster", found, f"{wanted} within {cluster.deadline_seconds:g} s", advice)
    return Reservation(name, group, cpus or 1.0)


def _cpus(wanted: list[tuple[int, int]]) -> float | None:
    """Returns the number of CPUs for each device of a process, at most 1, on the live nodes with the most CPUs; None if
    too few nodes are alive. `wanted` has the numbers of GPUs and CPUs that the run needs on each node."""
    left = sorted(alive_nodes(), key=lambda node: -node.total.get("CPU", 0.0))
    found = 1.0
    for gpus, cpus in sorted(wanted, reverse=True):  # the largest first, on the nodes with most CPUs
        node = next((node for node in left if node.total.get("GPU", 0.0) >= gpus), None)
        if node is None or not node.total.get("CPU"):
            return None
        left.remove(node)
        found = min(found, node.total["CPU"] / cpus)
    return found


def head_address() -> tuple[str, int]:
    """Returns the address and port of the cluster's control store."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return host.strip("[]"), int(port)


def attempt(seconds: float, action: Callable[[], Any]) -> None:
    """Runs an action for at most `seconds`, and ignores its failure. Ray waits a minute if the head node is lost."""
    late = DeadlineError("Ray", f"no answer in {seconds:g} s", change="check it with `ray status`")
    with contextlib.suppress(DeadlineError, RayError, RuntimeError, ValueError):
        within(seconds, action, late)


def _connection_error(address: str) -> OSError | None:
    """Tries to connect to host:port.  Returns the error, or None. Ray itself would try for half a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError("cluster.address", address, "host:port, auto or local")
    return connection_error(host.strip("[]"), int(port), CONNECT_SECONDS)


@contextmanager
def _sigterm_handler_kept() -> Iterator[None]:
    """Restores the handler of SIGTERM, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
