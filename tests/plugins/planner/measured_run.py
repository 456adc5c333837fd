# SPDX-License-Identifier: Apache-2.0
"""Trains by a config in a separate process and prints its memory: `python measured_run.py tensors|resident FILE`.

FILE is JSON: {"command": "train" or "sft", "recipe": ..., "overrides": {...}, "rows": [...]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from whet.config import SFTConfig, TrainConfig, load_config
from whet.tracking.profile import status_bytes
from whet.trainers.build import train
from whet.trainers.sft import train_sft


def uneven(solution_str: str) -> float:
    """A reward that differs between answers."""
    return float(sum(map(ord, solution_str)) % 3)


def run(wanted: dict[str, Any]) -> None:
    """The run itself."""
    recipe, overrides, rows = wanted["recipe"], wanted["overrides"], wanted["rows"]
    if wanted["command"] == "sft":
        train_sft(load_config(SFTConfig, recipe, overrides, given={"data"}).config, data=rows)
    else:
        train(load_config(TrainConfig, recipe, overrides, given={"data", "reward"}).config, reward=uneven, data=rows)


def peak_tensor_bytes(wanted: dict[str, Any]) -> int:
    """By torch's own allocator, which tells its profiler of every allocation."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run(wanted)
    changes: list[tuple[int, int]] = []
    events = list(profile.profiler.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.tag.name == "Allocation":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    now = peak = 0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak


if __name__ == "__main__":
    kind, file = sys.argv[1:]
    given = json.loads(Path(file).read_text())
    before = status_bytes("VmRSS")
    if kind == "tensors":
        sys.stdout.write(json.dumps({"tensor_bytes": peak_tensor_bytes(given)}))
    else:
        run(given)
        sys.stdout.write(json.dumps({"resident_bytes": status_bytes("VmHWM") - before}))
