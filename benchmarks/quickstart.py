# SPDX-License-Identifier: Apache-2.0
"""`whet quickstart`, from its start to its end."""

from __future__ import annotations

import json
import logging
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.setting import Setting

TITLE = "The quickstart"
NOTE = """\
The whole command, installation apart: data, model, warm-up, training until 98 % of the held-out problems are solved
twice in a row, export. Processor seconds are those of all its processes; rows without them are older than that stop,
and took all 600 steps. LOG.md has later ones, on two cores with AVX2 alone.
"""
log = logging.getLogger(__name__)
MEASURED = "measured.json"  # in its folder


def run(setting: Setting) -> dict[str, Any]:
    """The costs and results of each seed's run."""
    files = [prepare(setting, seed) / MEASURED for seed in setting.scale.quickstart_seeds]
    return {"summaries": [json.loads(path.read_text()) for path in files if path.exists()]}


def prepare(setting: Setting, seed: int) -> Path:
    """A folder with the files of `whet quickstart`; at less than full size without any training. Made once."""
    folder = setting.scratch / f"quickstart_{seed}"
    if folder.exists():
        return folder
    if setting.scale.is_thorough:
        log.info("whet quickstart, seed %d", seed)
        whet, began, used = str(Path(sys.executable).parent / "whet"), time.monotonic(), _processor_seconds()
        words = [whet, "quickstart", "--run-dir", str(folder), "--seed", str(seed)]
        subprocess.run(words, check=True, capture_output=True)
        measured = json.loads((folder / "summary.json").read_text())
        measured["dtype"] = yaml.safe_load((folder / "rl" / "config.yaml").read_text())["model"]["dtype"]
        measured["seconds"] = round(time.monotonic() - began, 1)  # with the imports
        measured["processor_seconds"] = round(_processor_seconds() - used, 1)
        (folder / MEASURED).write_text(json.dumps(measured))
        return folder
    from whet.plugins.lessons.init_model import init_model
    from whet.plugins.lessons.quickstart import write_problems

    write_problems(folder, seed)
    init_model(folder / "sft_model", "qwen3", "nano", alphabet="0123456789+=", num_layers=1)
    return folder


def _processor_seconds() -> float:
    """Of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def report(results: Mapping[str, Any]) -> list[str]:
    """A line for each seed."""
    found = results["quickstart"]["summaries"]
    if not found:
        return []
    return [
        "| `whet quickstart` | after SFT | after RL | steps | dtype | in all | processor | to the first RL step |",
        "|---|---|---|--:|---|--:|--:|--:|",
        *(
            f"| seed {each['seed']} | {each['sft_accuracy']:.3f} | {each['rl_accuracy']:.3f} | {each['steps']} "
            f"| {each.get('dtype', 'bfloat16')} | {each.get('seconds', each['seconds_total']):.0f} s "
            f"| {_shown(each.get('processor_seconds'))} | {each['seconds_to_first_rl_step']:.1f} s |"
            for each in found
        ),
    ]


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.0f} s"
