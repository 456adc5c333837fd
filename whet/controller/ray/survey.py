# SPDX-License-Identifier: Apache-2.0
"""A survey of a Ray cluster: each node reports on itself and on its connections to other nodes."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import ray
from ray import cloudpickle
from ray._private.utils import read_ray_address
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from whet import devices
from whet.config.cluster import ClusterConfig
from whet.controller.ray.session import Node, alive_nodes, all_nodes, connected, head_address

REPLY_SECONDS = 30.0  # includes the start of a Ray worker
CONNECT_SECONDS = 3.0
CLOCK_READINGS = 5  # the fastest one counts


@dataclass(frozen=True)
class NodeReport:
    """The report of a node about its packages, clock, disk, paths and connections to other nodes."""

    node: Node
    failure: str = ""  # the reason where the other fields are unset
    versions: Mapping[str, str] = field(default_factory=dict)
    clock_seconds: float = 0.0  # ahead of the caller's clock
    temporary: tuple[str, int] = ("", 0)  # folder and free bytes
    seen: tuple[bool, ...] = ()  # whether each path exists
    unreached: Mapping[str, str] = field(default_factory=dict)  # errors, by address of the other node


def survey(cluster: ClusterConfig, packages: Sequence[str], paths: Sequence[str]) -> tuple[str, list[NodeReport]]:
    """Returns the address of the running cluster, and a report of each node, dead ones included.

    Raises: ConfigError if no cluster runs."""
    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # for nodes without whet
    try:
        with connected(cluster.model_copy(update={"address": cluster.address or "auto"})):
            made: Any = ray.remote(_Probe)
            probes = {node: made.options(**_there(node)).remote() for node in alive_nodes()}
            listening: dict[str, tuple[str, int]] = {}
            for node, probe in probes.items():
                with suppress(RayError):  # `_report` reports it
                    listening[node.address] = (node.address, _ask(probe.listen, node.address))
            reports = [_report(node, probe, packages, paths, listening) for node, probe in probes.items()]
            dead = [NodeReport(node, "it has left the cluster, or died") for node in all_nodes() if not node.is_alive]
            for probe in probes.values():
                ray.kill(probe)
            return ":".join(map(str, head_address())), [*reports, *dead]
    finally:
        cloudpickle.unregister_pickle_by_value(here)


def bfloat16_by_node(cluster: ClusterConfig) -> dict[str, list[str]]:
    """Returns the processor instructions for bfloat16 matrix products, by node address. Empty if no cluster runs yet
    and the run starts one on this machine.  Raises: ConfigError."""
    named = cluster.address or os.environ.get("RAY_ADDRESS") or read_ray_address()
    if not ray.is_initialized() and named in (None, "local"):
        return {}
    ask = ray.remote(devices.bfloat16_instructions)
    with connected(cluster):
        asked = {node.address: ask.options(**_there(node)).remote() for node in alive_nodes()}
        return {address: ray.get(reply, timeout=REPLY_SECONDS) for address, reply in asked.items()}


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Returns the versions of Python and of the installed packages among `packages`."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            with suppress(ImportError, AttributeError):  # on the Python path, or of another name than its package
                found[name] = importlib.import_module(name).__version__
    return found


class _Probe:
    """An actor that examines its node, using only the standard library."""

    def listen(self, address: str) -> int:
        """Starts to accept connections on `address`.  Returns the port."""
        server = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)

        def accept() -> None:
            while True:
                server.accept()[0].close()

        threading.Thread(target=accept, daemon=True).start()
        return int(server.getsockname()[1])

    def time(self) -> float:
        """Reads the node's clock."""
        return time.time()

    def examine(
        self, packages: Sequence[str], paths: Sequence[str], others: Mapping[str, tuple[str, int]], seconds: float
    ) -> dict[str, Any]:
        """Returns the fields of a `NodeReport` that are measured on the node itself: all but the clock."""
        unreached = {}
        for address, listener in others.items():
            try:
                socket.create_connection(listener, seconds).close()
            except OSError as error:
                unreached[address] = str(error)
        folder = tempfile.gettempdir()
        return {
            "versions": versions(packages),
            "temporary": (folder, shutil.disk_usage(folder).free),
            "seen": tuple(os.path.exists(path) for path in paths),  # noqa: PTH110
            "unreached": unreached,
        }


def _there(node: Node) -> dict[str, Any]:
    """Returns the Ray options that place an actor or task on the node, even if its CPUs are in use."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False)}


def _ask(method: Any, *arguments: Any) -> Any:
    return ray.get(method.remote(*arguments), timeout=REPLY_SECONDS)


def _report(
    node: Node, probe: Any, packages: Sequence[str], paths: Sequence[str], listening: Mapping[str, tuple[str, int]]
) -> NodeReport:
    others = {address: listener for address, listener in listening.items() if address != node.address}
    try:
        found = _ask(probe.examine, list(packages), list(paths), others, CONNECT_SECONDS)
        return NodeReport(node, clock_seconds=_clock(probe), **found)
    except RayError as error:
        return NodeReport(node, str(error).strip().rpartition("\n")[2] or type(error).__name__)


def _clock(probe: Any) -> float:
    """Measures how many seconds the node's clock is ahead of this machine's. The fastest of several readings counts."""
    readings: list[tuple[float, float]] = []
    for _ in range(CLOCK_READINGS):
        before = time.time()
        there = _ask(probe.time)
        after = time.time()
        readings.append((after - before, there - (before + after) / 2))
    return min(readings)[1]
