# SPDX-License-Identifier: Apache-2.0
"""Two processes of one core each against one: the rollout and the update of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from benchmarks.record import Record, speed_up
from benchmarks.setting import Setting
from benchmarks.workload import Answers

TITLE = "Two processes"
NOTE = """\
`cluster.processes=2` against 1, every process on one core. In the rollout each process takes the next requests as it
has room; a decode step of this small model costs the same for few rows as for some dozens, so that few answers gain
little. In the update each process has half of the rows, and gradients are summed over gloo.
"""
PROCESSES = {"one process": 1, "two processes": 2}


def run(setting: Setting) -> dict[str, Any]:
    """Both phases, on ragged and on equal lengths."""
    found = {}
    many = {f"{case}, many": replace(each, n=4 * each.n) for case, each in setting.scale.rollout.items()}
    for phase, cases in (("rollout", setting.scale.rollout | many), ("update", setting.scale.step)):
        for case, answers in cases.items():
            requests = setting.workload.requests(answers)
            entries = {
                name: setting.whet("scaling", phase=phase, processes=count, requests=requests)
                for name, count in PROCESSES.items()
            }
            records = setting.take_turns(entries)
            found[f"{phase}, {case}"] = {
                "answers": asdict(answers),
                "records": {name: asdict(record) for name, record in records.items()},
            }
    return found


def report(results: Mapping[str, Any]) -> list[str]:
    """A table."""
    lines = ["| | " + " | ".join(PROCESSES) + " | two against one |", "|---" * (len(PROCESSES) + 2) + "|"]
    for case, section in results["scaling"].items():
        answers = Answers(**section["answers"])
        one, two = (Record(**section["records"][name]) for name in PROCESSES)
        lines.append(
            f"| {case}: {len(answers.lengths)} answers of {min(answers.lengths)} to {answers.longest} tokens "
            f"| {one.seconds:.3f} s | {two.seconds:.3f} s | {speed_up(one, two)} |"
        )
    return lines
