# SPDX-License-Identifier: Apache-2.0
"""One model on sums, programs and instructions at the same time: the recipe rlvr_three_domains."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.setting import Setting
from whet.plugins.plots.figures import Series, plot_learning_curve

TITLE = "Three domains"
NOTE = """\
`python examples/three_domains.py`, once, seed 0: one small model, 96 held-out problems of each domain, answered
greedily. Programs run in the sandbox.
"""
SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "three_domains.py"
DOMAINS = {"sums": "sums of two numbers", "code": "programs", "words": "instructions"}
SHOWN = (0, 25, 50, 100, 200)  # steps of the table


def run(setting: Setting) -> dict[str, Any]:
    """Held-out accuracy by domain and step, and the seconds of the whole."""
    if not setting.scale.is_thorough:
        return {}
    folder, start = setting.scratch / "three_domains", time.perf_counter()
    subprocess.run([sys.executable, str(SCRIPT), "--run-dir", str(folder)], check=True, capture_output=True)
    return {"seconds": time.perf_counter() - start, **read(folder)}


def read(folder: Path) -> dict[str, Any]:
    """The accuracies that a run of the example logged."""
    records = [json.loads(line) for line in (folder / "rl" / "metrics.jsonl").read_text().splitlines()]
    checked = [record for record in records if "val/accuracy" in record]
    return {name: {str(int(each["step"])): each[f"val/{name}/accuracy"] for each in checked} for name in DOMAINS}


def report(results: Mapping[str, Any]) -> list[str]:
    """A table and a picture."""
    found = results["three_domains"]
    if not found:
        return []
    lines = [f"| domain | {' | '.join(f'step {step}' for step in SHOWN)} |", "|---|" + "--:|" * len(SHOWN)]
    for name, label in DOMAINS.items():
        lines.append(f"| {label} | {' | '.join(f'{found[name][str(step)]:.3f}' for step in SHOWN)} |")
    return [*lines, "", f"{found['seconds']:.0f} s in all.", "", "![Held-out accuracy by domain](three_domains.png)"]


def draw(results: Mapping[str, Any], path: Path) -> None:
    """The curves."""
    curves = {label: results["three_domains"][name] for name, label in DOMAINS.items()}
    series = [Series(label, list(map(int, each)), list(each.values()), markers=True) for label, each in curves.items()]
    plot_learning_curve(path, series, title="One model, three domains", y_label="held-out accuracy")
