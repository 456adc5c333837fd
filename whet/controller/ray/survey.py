# SPDX-License-Identifier: Apache-2.0
"""What the nodes of a cluster say of themselves and of each other."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from whet.config.cluster import ClusterConfig
from whet.controller.ray import probe
from whet.controller.ray.session import Node, all_nodes, connect, head_address

ANSWER_SECONDS = 30.0  # a worker has to start first
CONNECT_SECONDS = 3.0
CLOCK_ASKED = 5  # times; the quickest answer counts


@dataclass(frozen=True)
class Report:
    """One node."""

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
    session = connect(cluster.model_copy(update={"address": cluster.address or "auto"}))
    cloudpickle.register_pickle_by_value(probe)
    try:
        alive = [node for node in all_nodes() if node.is_alive]
        asked = {node: _start(node) for node in alive}
        listening: dict[str, tuple[str, int]] = {}
        for node, actor in asked.items():
            with suppress(RayError):  # `_report` says what it is
                listening[node.address] = (node.address, _ask(actor.listen, node.address))
        reports = [_report(node, actor, packages, paths, listening) for node, actor in asked.items()]
        gone = [Report(node, "it has left the cluster, or died") for node in all_nodes() if not node.is_alive]
        for actor in asked.values():
            ray.kill(actor)
        return ":".join(map(str, head_address())), [*reports, *gone]
    finally:
        cloudpickle.unregister_pickle_by_value(probe)
        session.close()


def _start(node: Node) -> Any:
    here = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return ray.remote(probe.Probe).options(num_cpus=0, scheduling_strategy=here).remote()


def _ask(method: Any, *arguments: Any) -> Any:
    return ray.get(method.remote(*arguments), timeout=ANSWER_SECONDS)


def _report(
    node: Node, actor: Any, packages: Sequence[str], paths: Sequence[str], listening: Mapping[str, tuple[str, int]]
) -> Report:
    others = {address: place for address, place in listening.items() if address != node.address}
    try:
        said = _ask(actor.reaches, list(others.values()), CONNECT_SECONDS)
        return Report(
            node,
            versions=_ask(actor.versions, list(packages)),
            clock_seconds=_clock(actor),
            temporary=_ask(actor.free_bytes),
            seen=tuple(_ask(actor.sees, list(paths))),
            unreached={address: why for address, why in zip(others, said, strict=True) if why},
        )
    except RayError as error:
        return Report(node, str(error).strip().rpartition("\n")[2] or type(error).__name__)


def _clock(actor: Any) -> float:
    answers: list[tuple[float, float]] = []
    for _ in range(CLOCK_ASKED):
        before = time.time()
        there = _ask(actor.time)
        after = time.time()
        answers.append((after - before, there - (before + after) / 2))
    return min(answers)[1]
