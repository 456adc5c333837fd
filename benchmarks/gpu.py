# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu [PART ...]` (`make gpu PARTS="..."`): whet on this machine's accelerator.

Without names the five parts that need whet alone, in eight minutes and without a network; ALONE has those that are run
by name. Each part is a process that writes figures line by line; when it ends, or its time does, they go to gpu.jsonl,
where they take the place of older ones of the same card, and docs/gpu.md is written anew. On a machine without an
accelerator nothing is run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.competitor import ROOT
from benchmarks.machine import provenance
from docs.generate import gpu as page
from whet import devices
from whet.planning.units import size

PAGE, FILE = ROOT / "docs" / "gpu.md", page.FILE
SECONDS = 480.0  # for all parts without a name
SHOWN_LINES = 20  # of the end of what a part wrote
SUITES = ("tests/engines/test_conformance.py", "tests/rollout/test_engines.py")
NEED_ACCELERATOR = (
    "tests/plugins/inference/servers/test_weight_parts.py::test_another_process_reads_them_on_an_accelerator",
    "tests/plugins/migration/test_protocol.py::test_on_a_device",
    "tests/test_metrics.py::test_recording_does_not_wait_for_the_device",
)
TESTS = ("-m", "pytest", "-q", "-n", "8", "--on-device", "-m", "slow or not slow", "-k", "not documented and not users")
CARD = ("-m", "benchmarks.workers.card", "--out", "FIGURES")
STEP = ("-m", "benchmarks.workers.card_step", "FOLDER", "--out", "FIGURES")


@dataclass(frozen=True)
class Part:
    """Seconds at the most, and the arguments of a Python; FOLDER is a folder of its own, FIGURES its figures."""

    what: str
    seconds: float
    arguments: Sequence[str]
    python: str = ""  # the variable that names an environment, or its Python; "" for this one
    figure: str = ""  # the part's name in gpu.jsonl, where its time is a figure


# The limits of the first five add up to SECONDS: a slow part takes no time from the next.
PARTS: Mapping[str, Part] = {
    "quickstart": Part(
        "`whet quickstart`", 160.0, ("-m", "whet", "quickstart", "--run-dir", "FOLDER/run"), figure="quickstart"
    ),
    "speed": Part(
        "sampling, update, log-probs, checkpoints of 0.5B",
        130.0,
        (*CARD, "sample:0.5b", "update:0.5b", "log_probs:0.5b", "update:0.5b:checkpoints"),
    ),
    "exactness": Part("log-probs and gradients against the host", 60.0, ("-m", "benchmarks", "exactness", "--quick")),
    "memory": Part("planned and measured", 50.0, ("-m", "benchmarks.workers.device_memory", "FOLDER")),
    "conformance": Part("the suites of the engines", 80.0, (*TESTS, *SUITES, *NEED_ACCELERATOR)),
}
ALONE: Mapping[str, Part] = {
    "kernels": Part("kernels against plain torch, and their times", 120.0, (*CARD, "kernels", "stretches")),
    "models": Part("sampling and update of 1.5B", 290.0, (*CARD, "sample:1.5b", "update:1.5b")),
    "seven": Part("sampling and update of 7B", 290.0, (*CARD, "sample:7b", "update:7b:checkpoints:narrow")),
    "waits": Part("places where the host waits for the device", 120.0, (*CARD, "waits:0.5b")),
    "invariant": Part(
        "`batch_invariant` beside the usual way",
        240.0,
        ("-m", "benchmarks.workers.card_invariant", "invariant:0.5b", "--out", "FIGURES"),
    ),
    "start": Part("`whet train` to the end of its first step", 240.0, (*STEP, "start:cold", "start:warm")),
    "trl": Part("a GRPO step beside TRL (WHET_TRL_VENV)", 300.0, (*STEP, "step:0.5b")),
    "trl_1_5b": Part("the same with 1.5B", 300.0, (*STEP, "step:1.5b")),
    "vllm": Part(
        "the same requests by vLLM (WHET_VLLM_PYTHON)",
        300.0,
        ("-m", "benchmarks.workers.card_vllm", "FOLDER", "--out", "FIGURES", "0.5b", "1.5b", "7b"),
        python="WHET_VLLM_PYTHON",
    ),
    "vllm_run": Part(
        "GRPO with vLLM beside the trainer, weights by handles (WHET_VLLM_PYTHON)",
        300.0,
        ("-m", "benchmarks.workers.device_vllm", "FOLDER", "--out", "FIGURES"),
    ),
}
OWN = {"WHET_VLLM_PYTHON": str(ROOT / ".venv-vllm" / "bin" / "python")}  # of `make vllm`
THREADS = {"OMP_NUM_THREADS": "2"}  # of a process on the host, several of which run side by side
NONE_HERE = "torch finds no accelerator on this machine: nothing was run, and docs/gpu.md is as it was"


@dataclass(frozen=True)
class Outcome:
    """How one part went."""

    name: str
    seconds: float
    ended: str  # ok, failed with 1, cut off
    output: str
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)  # by part, the newest


def main(names: Sequence[str]) -> int:
    """Runs the parts of these names, and returns the exit status."""
    parts = {**PARTS, **ALONE}
    if unknown := [name for name in names if name not in parts]:
        print(f"there is no part {', '.join(unknown)}; there are {', '.join(parts)}", file=sys.stderr)
        return 2
    device = devices.here()
    if device == devices.HOST:
        print(NONE_HERE)
        return 0
    where, outcomes = place(device), list[Outcome]()
    print("".join(f"{name}: {value}\n" for name, value in where.items()), flush=True)
    for name in names or PARTS:
        print(f"{name} ({parts[name].what}) ...", flush=True)
        outcomes.append(run(name, parts[name]))
        keep(outcomes[-1], where)
        print(f"  {outcomes[-1].ended} after {outcomes[-1].seconds:.0f} s", flush=True)
        if outcomes[-1].ended != "ok" or not outcomes[-1].figures:
            print("\n".join(f"    {line}" for line in outcomes[-1].output.splitlines()[-SHOWN_LINES:]), flush=True)
    print(page.table(page.records(FILE)))
    return int(any(each.ended != "ok" for each in outcomes))


def run(name: str, part: Part, clock: Callable[[], float] = time.monotonic) -> Outcome:
    """One part in a process of its own, which ends when its time does; the figures that it wrote until then stay."""
    python = os.environ.get(part.python) or OWN.get(part.python) if part.python else sys.executable
    if python is None or not Path(python).is_file():
        return Outcome(name, 0.0, f"not run: {part.python} names no Python with its packages", "")
    with tempfile.TemporaryDirectory(prefix="whet-gpu-") as folder:
        file, start = Path(folder) / "figures.jsonl", clock()
        given = [each.replace("FOLDER", folder).replace("FIGURES", str(file)) for each in part.arguments]
        process = subprocess.Popen(
            [python, *given],
            cwd=ROOT,
            env={**THREADS, **os.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, told = process.communicate(timeout=part.seconds)
            ended = "ok" if process.returncode == 0 else f"failed with {process.returncode}"
            output += told if process.returncode else ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its servers and runs, which would keep the card
            ended, (output, _) = "cut off", process.communicate()
        seconds, figures = clock() - start, dict[str, dict[str, Any]]()
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            found = json.loads(line)
            figures.setdefault(found.pop("part"), {}).update(found)
        if part.figure and ended == "ok":
            figures[part.figure] = {"seconds": round(seconds, 1)}
        return Outcome(name, seconds, ended, output.replace(folder, "FOLDER"), figures)


def place(device: torch.device) -> dict[str, str]:
    """The card, versions and commit that figures belong to."""
    free, total = torch.accelerator.get_memory_info(device)
    found = provenance()
    return {
        "card": torch.get_device_module(device).get_device_name(device),
        "commit": str(found["commit"])[:8],
        "torch": torch.__version__,
        "memory": f"{size(total)}, {size(free)} free before",
    }


def keep(outcome: Outcome, where: Mapping[str, str]) -> None:
    """Writes a part's figures into the file and the page."""
    for part, figures in outcome.figures.items():
        told = {name: value for name, value in figures.items() if isinstance(value, int | float)}
        if told:
            record = {"part": part, **{name: where[name] for name in ("card", "commit", "torch")}, **told}
            lines = [json.dumps(each) for each in page.merged(page.records(FILE), record)]
            FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    PAGE.write_text(page.page(PAGE.read_text(encoding="utf-8"), page.records(FILE)), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
