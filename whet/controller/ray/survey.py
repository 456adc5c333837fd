# SPDX-License-Identifier: Apache-2.0
"""The reports of the nodes of a cluster on themselves and on each other."""

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
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from whet.config.cluster import ClusterConfig
from whet.controller.ray.session import Node, all_nodes, connected, head_address

ANSWER_SECONDS = 30.0  # a worker has to start first
CONNECT_SECONDS = 3.0
CLOCK_ASKED = 5  # times; the quickest answer counts


@dataclass(frozen=True)
class Report:
    """A node's view of itself and of the others."""

    node: Node
    failure: str = ""  # why the rest is unset
    versions: Mapping[str, str] = field(default_factory=dict)
    clock_seconds: float = 0.0  # ahead of the caller's
    temporary: tuple[str, int] = ("", 0)  # folder and free bytes
    seen: tuple[bool, ...] = ()  # which of the paths are there
    unreached: Mapping[str, str] = field(default_factory=dict)  # why, by address of the other node


def survey(cluster: ClusterConfig, packages: Sequence[str], paths: Sequence[str]) -> tuple[str, list[Report]]:
    """The address of the cluster that runs, and a report of each node, those that are gone among them.

    Raises: ConfigError where no cluster runs."""
    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # to nodes without whet too
    try:
        with connected(cluster.model_copy(update={"address": cluster.address or "auto"})):
            asked = {node: _start(node) for node in all_nodes() if node.is_alive}
            places: dict[str, tuple[str, int]] = {}
            for node, probe in asked.items():
                with suppress(RayError):  # `_report` says what it is
                    places[node.address] = (node.address, _ask(probe.listen, node.address))
            reports = [_report(node, probe, packages, paths, places) for node, probe in asked.items()]
            gone = [Report(node, "it has left the cluster, or died") for node in all_nodes() if not node.is_alive]
            for probe in asked.values():
                ray.kill(probe)
            return ":".join(map(str, head_address())), [*reports, *gone]
    finally:
        cloudpickle.unregister_pickle_by_value(here)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Returns the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            with suppress(ImportError, AttributeError):  # on the Python path only
                found[name] = importlib.import_module(name).__version__
    return found


class _Probe:
    """Looks at its node from inside, with the standard library alone."""

    def listen(self, address: str) -> int:
        """Takes connections from now on.  Returns the port."""
        server = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)

        def accept() -> None:
            while True:
                server.accept()[0].close()

        threading.Thread(target=accept, daemon=True).start()
        return int(server.getsockname()[1])

    def time(self) -> float:
        """Reads the node's clock."""
        return time.time()

    def look(
        self, packages: Sequence[str], paths: Sequence[str], others: Mapping[str, tuple[str, int]], seconds: float
    ) -> dict[str, Any]:
        """Fields of a Report."""
        unreached = {}
        for address, place in others.items():
            try:
                socket.create_connection(place, seconds).close()
            except OSError as error:
                unreached[address] = str(error)
        folder = tempfile.gettempdir()
        return {
            "versions": versions(packages),
            "temporary": (folder, shutil.disk_usage(folder).free),
            "seen": tuple(os.path.exists(path) for path in paths),  # noqa: PTH110
            "unreached": unreached,
        }


def _start(node: Node) -> Any:
    here = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return ray.remote(_Probe).options(num_cpus=0, scheduling_strategy=here).remote()


def _ask(method: Any, *arguments: Any) -> Any:
    return ray.get(method.remote(*arguments), timeout=ANSWER_SECONDS)


def _report(
    node: Node, probe: Any, packages: Sequence[str], paths: Sequence[str], places: Mapping[str, tuple[str, int]]
) -> Report:
    others = {address: place for address, place in places.items() if address != node.address}
    try:
        found = _ask(probe.look, list(packages), list(paths), others, CONNECT_SECONDS)
        return Report(node, clock_seconds=_clock(probe), **found)
    except RayError as error:
        return Report(node, str(error).strip().rpartition("\n")[2] or type(error).__name__)


def _clock(probe: Any) -> float:
    answers: list[tuple[float, float]] = []
    for _ in range(CLOCK_ASKED):
        before = time.time()
        there = _ask(probe.time)
        after = time.time()
        answers.append((after - before, there - (before + after) / 2))
    return min(answers)[1]
