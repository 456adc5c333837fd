# SPDX-License-Identifier: Apache-2.0
"""How long a command takes that only answers: a fresh process each time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.setting import Setting

TITLE = "Commands that only answer"
NOTE = """\
Each in a fresh process.
"""
COMMANDS = ("whet --help", "whet config train gsm8k")


def run(setting: Setting) -> dict[str, Any]:
    """Seconds of each command, in turn."""
    seconds: dict[str, list[float]] = {command: [] for command in COMMANDS}
    for _ in range(setting.scale.cold_starts):
        for command in COMMANDS:
            program, *words = command.split()
            start = time.perf_counter()
            subprocess.run([Path(sys.executable).parent / program, *words], capture_output=True, check=True)
            seconds[command].append(time.perf_counter() - start)
    return seconds


def report(results: Mapping[str, Any]) -> list[str]:
    """A table."""
    lines = ["| command | seconds | bound |", "|---|---|---|"]
    return lines + [f"| `{name}` | {median(taken):.2f} | 1 |" for name, taken in results["cold_start"].items()]
