# SPDX-License-Identifier: Apache-2.0
"""Findings; how they are gathered is tested on two nodes in tests/controller/test_ray_nodes.py."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
from whet.controller.ray.session import Node
from whet.controller.ray.survey import NodeReport
from whet.planning.doctor import of_node

HERE = {"python": "3.11.7", "whet": "0.1.0", "torch": "2.13.0"}
NODE = Node("1f", "10.0.0.2", 40001, {"CPU": 8.0, "GPU": 2.0})


def findings(report: NodeReport) -> list[tuple[str, str, str, str]]:
    found = of_node(report, HERE, ["/runs, the folder of runs", "model.path=/model"])
    return [(each.status, each.what, each.found, each.advice) for each in found]


def test_what_does_not_fit_has_its_finding() -> None:
    report = NodeReport(
        NODE,
        versions={"python": "3.11.9", "whet": "0.1.0"},
        clock_seconds=-4.25,
        temporary=("/tmp", 300 * 2**20),
        seen=(True, False),
        unreached={"10.0.0.3": "timed out"},
    )
    assert findings(report) == [
        ("ok", "resources", "10.0.0.2 (8 CPUs, 2 GPUs)", ""),
        ("problem", "python", "3.11.9", "this machine has 3.11.7: install the same version"),
        ("ok", "whet", "0.1.0", ""),
        ("problem", "torch", "not installed", "install torch 2.13.0, as on this machine"),
        ("problem", "disk", "/tmp, 300 MiB free", "free disk space"),
        ("ok", "files", "/runs, the folder of runs", ""),
        (
            "problem",
            "files",
            "model.path=/model: not found",
            "put it on a file system that all nodes have under this path",
        ),
        ("note", "clock", "-4.250 s relative to this machine", "times in logs will not match: synchronise it by NTP"),
        (
            "problem",
            "network",
            "no connection to 10.0.0.3: timed out",
            "open all ports between the nodes: workers use any free port",
        ),
    ]


def test_a_node_that_says_nothing() -> None:
    [silent] = findings(NodeReport(NODE, failure="Get timed out: some object(s) not ready."))
    assert silent[:3] == ("problem", "node", "Get timed out: some object(s) not ready.")
    gone = Node("2f", "10.0.0.3", 40001, {}, is_alive=False)
    assert findings(NodeReport(gone, failure="it has left the cluster, or died"))[0][0] == "note"
