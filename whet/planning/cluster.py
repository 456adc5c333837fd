# SPDX-License-Identifier: Apache-2.0
"""`whet doctor --cluster`: compares the nodes of a Ray cluster with this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from whet.config.schema import SFTConfig, TrainConfig
from whet.errors import ConfigError, pip_install
from whet.planning.doctor import LITTLE_DISK, Finding
from whet.planning.machine import existing
from whet.planning.units import size

if TYPE_CHECKING:
    from whet.controller.ray.survey import Report

PACKAGES = ("whet", "torch", "transformers", "ray", "tensordict", "numpy")
APART_SECONDS = 1.0


def examine_cluster(config: TrainConfig | SFTConfig, run_dir: Path) -> dict[str, list[Finding]]:
    """Checks the cluster: a section for the cluster and one for each node."""
    try:
        from whet.controller.ray.survey import survey, versions
    except ModuleNotFoundError:
        return {"cluster": [Finding("Ray", "not installed", pip_install("ray"), is_problem=True)]}
    place = existing(run_dir.expanduser().absolute())
    with tempfile.NamedTemporaryFile(dir=place, prefix=".whet-doctor-") as marker:
        paths = {marker.name: f"{place}, the folder of runs"}
        model = config.model.path
        if model is not None and Path(model).expanduser().is_dir():
            paths[str(Path(model).expanduser().resolve())] = f"model.path={model}"
        try:
            address, reports = survey(config.cluster, PACKAGES, list(paths))
        except ConfigError as error:
            return {"cluster": [Finding("Ray", "not reached", str(error), is_problem=True)]}
    alive = [report for report in reports if report.node.is_alive]
    wanted = config.cluster.nnodes
    few = f"cluster.nnodes={wanted}: add nodes with ray start --address={address}" if len(alive) < wanted else ""
    count = Finding("nodes", f"{len(alive)} at {address}", few, is_problem=True)
    here = versions(PACKAGES)
    sections = {"cluster": [count]}
    for report in reports:
        sections.setdefault(f"node {report.node.address}", []).extend(of_node(report, here, list(paths.values())))
    return sections


def of_node(report: Report, here: Mapping[str, str], paths: list[str]) -> Iterator[Finding]:
    """Yields the findings of one node: its versions compared with those `here`, whether it has the files `paths`."""
    if report.failure:
        is_alive = report.node.is_alive
        advice = "read the log of its raylet" if is_alive else "`ray status` may have the reason"
        yield Finding("node", report.failure, advice, is_problem=is_alive)
        return
    yield Finding("resources", str(report.node))
    for name, wanted in here.items():
        found = report.versions.get(name)
        if found is None:
            yield Finding(name, "not installed", f"install {name} {wanted}, as on this machine", is_problem=True)
        else:
            advice = "" if found == wanted else f"this machine has {wanted}: install the same version"
            yield Finding(name, found, advice, is_problem=True)
    folder, free = report.temporary
    advice = "free disk space" if free < LITTLE_DISK else ""
    yield Finding("disk", f"{folder}, {size(free)} free", advice, is_problem=True)
    for path, seen in zip(paths, report.seen, strict=True):
        advice = "" if seen else "put it on a file system that all nodes have under this path"
        yield Finding("files", path if seen else f"{path}: not found", advice, is_problem=True)
    apart = "times in logs will not match: synchronise it by NTP" if abs(report.clock_seconds) > APART_SECONDS else ""
    yield Finding("clock", f"{report.clock_seconds:+.3f} s relative to this machine", apart)
    for address, why in report.unreached.items():
        advice = "open all ports between the nodes: workers use any free port"
        yield Finding("network", f"no connection to {address}: {why}", advice, is_problem=True)
    if not report.unreached:
        yield Finding("network", "connects to every other node")
