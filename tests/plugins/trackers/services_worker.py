# SPDX-License-Identifier: Apache-2.0
"""Logs steps as a run does: python services_worker.py FOLDER SERVICE STEPS_DONE LAST_STEP [kill]"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from whet.tracking.service import TrackedRun, open_services
from whet.tracking.tracker import JsonlTracker, TableRow, cut_back

FLUSH_SECONDS = 3.0  # in which a service has written what it was told, most of them


def value(step: int) -> float:
    """The number that is logged in a step."""
    return step / 8


def rows(step: int) -> list[TableRow]:
    """The table of a step: markup, line breaks, commas, nothing."""
    return [
        {"prompt": f"{step}+1=", "response": '<b>|`2`\n3, "4"</b>', "reward": 0.5, "accuracy": None, "failure": ""},
        {"prompt": "é 日本", "response": "", "reward": None, "accuracy": 1, "failure": "reward: late"},
    ]


if __name__ == "__main__":
    folder, service, steps_done, last_step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    config = {"rollout": {"n": 4}, "trainer": {"logger": [service]}, "extra": {"judge's key": None}}
    cut_back(folder / "metrics.jsonl", steps_done)
    file = JsonlTracker(folder / "metrics.jsonl")
    [tracker] = open_services([service], TrackedRun(folder, "project", "sevens", config, steps_done))
    for step in range(steps_done + 1, last_step + 1):
        numbers = {"critic/score/mean": value(step), "val/open ai: 8k#/accuracy": float("nan"), "time/step": 0.1}
        file.log(step, numbers)
        tracker.log(step, numbers, {"generations/rollout": rows(step)} if step % 2 == 0 else {})
    if "kill" in sys.argv:
        time.sleep(FLUSH_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)
    tracker.close()
