# SPDX-License-Identifier: Apache-2.0
"""How far numbers that should be equal are apart, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.competitor import take_turns
from benchmarks.setting import Setting

TITLE = "Exactness"
NOTE = """\
This section has no times, but the differences between numbers that should be equal. Gradients are compared with those
of one padded micro-batch in one process.
"""
SPLITS = (  # layout, tokens a micro-batch, processes; all against one padded micro-batch in one process
    ("packed", 10**9, 1),
    ("padded", 2048, 1),
    ("packed", 2048, 1),
    ("packed", 1, 1),  # a row at a time
    ("padded", 10**9, 2),
    ("packed", 2048, 2),
)


def run(setting: Setting) -> dict[str, Any]:
    """One turn: nothing here is a time."""
    requests = setting.workload.requests(setting.scale.exactness)
    entry = setting.whet("exactness", requests=requests, splits=SPLITS if setting.scale.is_thorough else SPLITS[-1:])
    record = take_turns({"exactness": entry}, rounds=1, warm_up=0, scratch=setting.scratch)["exactness"]
    return {**record.rounds[0], "requests": len(requests)}


def report(results: Mapping[str, Any]) -> list[str]:
    """Two tables."""
    section = results["exactness"]
    gap = section["log_prob_gap"]
    lines = [
        "| float32 | found | bound |",
        "|---|---|---|",
        f"| log-prob of rollout and trainer, mean gap over {gap['tokens']:,} tokens | {gap['mean']:.1e} | 5e-6 |",
        f"| the same, largest gap | {gap['max']:.1e} | 1e-4 |",
    ]
    for split in section["gradients"]:
        size = "one micro-batch" if split["max_tokens"] >= 10**9 else f"{split['max_tokens']:,} tokens a micro-batch"
        size = "a row at a time" if split["max_tokens"] == 1 else size
        where = "one process" if split["processes"] == 1 else f"{split['processes']} processes"
        lines.append(
            f"| gradient, {split['layout']}, {size}, {where}: relative norm of the difference "
            f"| {split['difference']:.1e} | 1e-5 |"
        )
    for name, same in section["company"].items():
        against = f"a request {name} and among {section['requests'] - 1} others: the same tokens"
        lines.append(f"| {against} | {'yes' if same else 'NO'} | yes |")
    return lines
