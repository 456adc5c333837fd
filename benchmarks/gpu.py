# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.gpu` (`make gpu`): shows whet on this machine's accelerator, and writes docs/gpu.md.

At most ten minutes and no network: the quickstart, exactness, speed, a memory report, and the conformance suites with
what else needs an accelerator. On a machine without an accelerator it says so, and changes nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.competitor import ROOT
from benchmarks.machine import provenance
from whet import devices
from whet.planning.fit import size

PAGE = ROOT / "docs" / "gpu.md"
SECONDS = 590.0  # for everything
SHOWN_LINES = 20  # of the end of what a part wrote
SUITES = ("tests/engines/test_conformance.py", "tests/rollout/test_engines.py")
NEED_ACCELERATOR = (
    "tests/rollout/servers/test_parts.py::test_another_process_reads_them_on_an_accelerator",
    "tests/test_protocol.py::test_on_a_device",
    "tests/test_metrics.py::test_recording_does_not_wait_for_the_device",
)
TESTS = ("-m", "pytest", "-q", "-n", "8", "--on-device", "-m", "slow or not slow", "-k", "not documented and not users")
# Title, seconds at the most, arguments of Python; FOLDER is a folder of its own. The limits add up to SECONDS: a slow
# part takes no time from the next.
PARTS: Mapping[str, tuple[float, Sequence[str]]] = {
    "Quickstart": (200.0, ("-m", "whet", "quickstart", "--run-dir", "FOLDER/quickstart")),
    "Exactness": (80.0, ("-m", "benchmarks", "exactness", "--quick")),
    "Speed": (80.0, ("-m", "benchmarks.workers.device_speed", "FOLDER")),
    "Memory, planned and measured": (100.0, ("-m", "benchmarks.workers.device_memory", "FOLDER")),
    "Conformance of the engines": (130.0, (*TESTS, *SUITES, *NEED_ACCELERATOR)),
}
# By name alone: `python -m benchmarks.gpu vLLM`.
BESIDE: Mapping[str, tuple[float, Sequence[str]]] = {
    "vLLM": (300.0, ("-m", "benchmarks.workers.device_vllm", "FOLDER")),
}
THREADS = {"OMP_NUM_THREADS": "2"}  # of a process on the host, several of which run side by side
NONE_HERE = "torch finds no accelerator on this machine: nothing was run, and docs/gpu.md is as it was"
HEAD = """\
# On an accelerator

Written by `make gpu`: one command, at most ten minutes, no network.

{facts}
"""


@dataclass(frozen=True)
class Outcome:
    """How one part went."""

    title: str
    command: str
    seconds: float
    ended: str  # ok, failed with 1, cut off
    output: str


def main(names: Sequence[str] = ()) -> int:
    """Runs all parts, writes the page, and returns the exit status; with names of parts runs these, and prints them."""
    device = devices.here()
    if device == devices.HOST:
        print(NONE_HERE)
        return 0
    if names:
        parts = {**PARTS, **BESIDE}
        outcomes = [run(name, parts[name][1], parts[name][0]) for name in names]
        print(page(facts(device), outcomes))
        return int(any(each.ended != "ok" for each in outcomes))
    outcomes, until = [], time.monotonic() + SECONDS
    for title, (seconds, arguments) in PARTS.items():
        print(f"{title} ...", flush=True)
        outcomes.append(run(title, arguments, min(seconds, until - time.monotonic())))
        print(f"  {outcomes[-1].ended} after {outcomes[-1].seconds:.0f} s", flush=True)
    PAGE.write_text(page(facts(device), outcomes), encoding="utf-8")
    print(f"wrote {PAGE}")
    return int(any(each.ended != "ok" for each in outcomes))


def run(title: str, arguments: Sequence[str], seconds: float, clock: Callable[[], float] = time.monotonic) -> Outcome:
    """One part in a process of its own, ended when its time is over."""
    with tempfile.TemporaryDirectory(prefix="whet-gpu-") as folder:
        given = [each.replace("FOLDER", folder) for each in arguments]
        command, start = f"python {' '.join(arguments)}", clock()
        if seconds <= 0:
            return Outcome(title, command, 0.0, "left out, as the time was over", "")
        try:
            done = subprocess.run(
                [sys.executable, *given],
                cwd=ROOT,
                env={**THREADS, **os.environ},
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
            ended, output = "ok" if done.returncode == 0 else f"failed with {done.returncode}", done.stdout
            output += done.stderr if done.returncode else ""
        except subprocess.TimeoutExpired as error:
            ended, output = "cut off", (error.stdout or b"").decode(errors="replace")
        return Outcome(title, command, clock() - start, ended, output.replace(folder, "FOLDER"))


def facts(device: torch.device) -> str:
    """The accelerator, versions and commit."""
    module = torch.get_device_module(device)
    free, total = torch.accelerator.get_memory_info(device)
    found = {
        "accelerator": f"{module.get_device_name(device)}, {devices.count()} of them, {size(total)} each",
        "free before": size(free),
        **provenance(),
    }
    return "".join(f"- {name}: {value}\n" for name, value in found.items())


def page(facts: str, outcomes: Sequence[Outcome]) -> str:
    """The whole page."""
    lines = ["| part | seconds | |", "|---|---|---|"]
    lines += [f"| {each.title} | {each.seconds:.0f} | {each.ended} |" for each in outcomes]
    parts = [HEAD.format(facts=facts), "\n".join(lines), ""]
    for each in outcomes:
        shown = "\n".join(each.output.strip().splitlines()[-SHOWN_LINES:])
        parts.append(f"\n## {each.title}\n\n`{each.command}`\n\n```text\n{shown}\n```")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
