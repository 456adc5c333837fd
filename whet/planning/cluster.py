# SPDX-License-Identifier: Apache-2.0
"""What the nodes of a Ray cluster are to a run that starts here."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from whet.config.schema import SFTConfig, TrainConfig
from whet.errors import ConfigError, pip_install
from whet.planning.doctor import LITTLE_DISK, Finding
from whet.planning.fit import size
from whet.planning.machine import existing

if TYPE_CHECKING:
    from whet.controller.ray.survey import Report

PACKAGES = ("whet", "torch", "transformers", "ray", "tensordict", "numpy")
APART_SECONDS = 1.0


def examine_cluster(config: TrainConfig | SFTConfig, run_dir: Path) -> dict[str, list[Finding]]:
    """A section for the cluster and one for each node."""
    try:
        from whet.controller.ray.survey import survey, versions
    except ModuleNotFoundError:
        return {"cluster": [Finding("problem", "Ray", "not installed", pip_install("ray"))]}
    place = existing(run_dir.expanduser().absolute())
    with tempfile.NamedTemporaryFile(dir=place, prefix=".whet-doctor-") as marker:
        paths = {marker.name: f"{place}, where runs are written"}
        model = config.model.path
        if model is not None and Path(model).expanduser().is_dir():
            paths[str(Path(model).expanduser().resolve())] = f"model.path={model}"
        try:
            address, reports = survey(config.cluster, PACKAGES, list(paths))
        except ConfigError as error:
            return {"cluster": [Finding("problem", "Ray", str(error))]}
    alive = [report for report in reports if report.node.is_alive]
    few = len(alive) < config.cluster.nnodes
    count = Finding(
        "problem" if few else "ok",
        "nodes",
        f"{len(alive)} at {address}",
        f"cluster.nnodes={config.cluster.nnodes}: add nodes with ray start --address={address}" if few else "",
    )
    here = versions(PACKAGES)
    sections = {"cluster": [count]}
    for report in reports:
        sections.setdefault(f"node {report.node.address}", []).extend(of_node(report, here, list(paths.values())))
    return sections


def of_node(report: Report, here: Mapping[str, str], paths: list[str]) -> Iterator[Finding]:
    """What one node says, against the versions here; `paths` are in words what it was asked to see."""
    if report.failure:
        is_alive = report.node.is_alive
        advice = "look at the log of its raylet" if is_alive else "`ray status` may say why"
        yield Finding("problem" if is_alive else "note", "node", report.failure, advice)
        return
    yield Finding("ok", "resources", str(report.node))
    for name, wanted in here.items():
        found = report.versions.get(name)
        if found is None:
            yield Finding("problem", name, "not installed", f"install {name} {wanted}, which is used here")
        elif found != wanted:
            yield Finding("problem", name, found, f"{wanted} is used here: install the same")
        else:
            yield Finding("ok", name, found)
    folder, free = report.temporary
    little = free < LITTLE_DISK
    yield Finding("problem" if little else "ok", "disk", f"{folder}, {size(free)} free", "make room" if little else "")
    for path, seen in zip(paths, report.seen, strict=True):
        advice = "" if seen else "put it on a file system that all nodes see under this path"
        yield Finding("ok" if seen else "problem", "files", path if seen else f"{path}: not there", advice)
    apart = abs(report.clock_seconds) > APART_SECONDS
    advice = "times in logs do not fit together: set it by NTP" if apart else ""
    yield Finding("note" if apart else "ok", "clock", f"{report.clock_seconds:+.3f} s against this one", advice)
    for address, why in report.unreached.items():
        advice = "open all ports between the nodes: workers connect on free ones"
        yield Finding("problem", "network", f"no connection to {address}: {why}", advice)
    if not report.unreached:
        yield Finding("ok", "network", "connects to every other node")
