# SPDX-License-Identifier: Apache-2.0
"""How many small programs a second a sandbox runs, two at a time."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from benchmarks.setting import Setting
from whet.plugins.sandbox.local import LocalSandbox
from whet.plugins.scores.code import Suite, run_tests
from whet.programs.protocol import Job, Limits

TITLE = "Programs in the sandbox"
NOTE = """\
A program prints a number; tests are two assertions on a function. Two run at a time, ways take turns. "Interpreter of
its own" starts Python anew in new namespaces; "forked" is a fork of a process that has loaded common modules, in new
namespaces.
"""
PROGRAMS, AT_A_TIME = 100, 2
BOUNDS = {"interpreter of its own": 25, "forked": 60}
CODE = "print(sum(range(100)))"
TESTS = Suite("code", ["assert f(2) == 4", "assert f(3) == 9"])


def run(setting: Setting) -> dict[str, Any]:
    """Programs a second, by way and round."""
    if shutil.which("bwrap") is None:
        return {}
    box, plain = LocalSandbox(), LocalSandbox(isolated=False)
    own = [*box.python, "-c", CODE]

    def tests() -> None:
        assert run_tests(box, "python", "def f(x): return x * x", TESTS, Limits()) == [(True, ""), (True, "")]

    ways: dict[str, Callable[[], Any]] = {
        "interpreter of its own": lambda: box.run_job(Job(argv=own)),
        "forked": lambda: box.run_job(Job(code=CODE)),
        "tests of a function": tests,
        "forked, unisolated": lambda: plain.run_job(Job(code=CODE)),
        "no sandbox: subprocess.run": lambda: subprocess.run(
            [sys.executable, "-I", "-S", "-c", CODE], capture_output=True, check=True
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for way in ways.values():
            way()
        for _ in range(setting.scale.rounds):
            for name, way in ways.items():
                start = time.perf_counter()
                for done in [pool.submit(way) for _ in range(PROGRAMS)]:
                    done.result()
                rates[name].append(PROGRAMS / (time.perf_counter() - start))
    box.close()
    plain.close()
    return rates


def report(results: Mapping[str, Any]) -> list[str]:
    """A table."""
    lines = ["| way | programs a second (range) | at least |", "|---|---|---|"]
    for name, rates in results["sandbox"].items():
        lines.append(
            f"| {name} | {median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f}) | {BOUNDS.get(name, '')} |"
        )
    return lines
