# SPDX-License-Identifier: Apache-2.0
"""Compares the speed and the memory of two commits: runs of `whet train` in turn on this machine, in pairs.

    python -m benchmarks same_speed --before 63aba1a                    against the files that lie here
    python -m benchmarks same_speed --before 63aba1a --after HEAD --pairs 15

Two runs: `long`, whose answers are long, for the rollout and the update; and the quickstart's recipe, for its step. A
run's seconds are the median of its steps without the first ones. Two imports, in CPU seconds, the median of several
processes: `import whet`, and the modules of the server of child processes. A pair's ratio is after / before. Exit
status: 1 if the lower 95 % bound of the median ratio is above 1.03 anywhere, or the median peak of memory grew by more
than 2 % and more than 30 MiB.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.machine import OthersClock
from benchmarks.revision import SAME, WORKING_TREE, Revision, check_out, finish_measured, write_additions
from benchmarks.same_bits import RENAMED_KEYS

log = logging.getLogger(__name__)
# Name in timings.jsonl -> the name in the commit after.
RENAMED_TIMES: dict[str, str] = {}

CONFIDENCE = 0.95
MOST_SLOWER = 1.03
MOST_MEMORY_SHARE, MOST_MEMORY_BYTES = 0.02, 30 * 2**20
WARM_UP_STEPS = 2
IMPORTS = 9  # processes of a measurement
BUSY = 0.05  # share of the cores that others may take before the times are worth little


@dataclass(frozen=True)
class Workload:
    """A `whet train` whose steps are timed."""

    words: tuple[str, ...]
    times: tuple[str, ...]  # names in timings.jsonl

    def measure(self, revision: Revision, folder: Path, renamed: Mapping[str, str]) -> Measured:
        """Runs it on one commit, on all cores, and deletes its files.  Raises: CommandError."""
        process = revision.start([*self.words, "trainer.run_dir=run"], folder, threads=os.cpu_count() or 1)
        used = finish_measured(process, folder)
        seconds = seconds_of(folder / "run", self.times, renamed)
        shutil.rmtree(folder)
        return Measured(seconds, used.peak_bytes)


@dataclass(frozen=True)
class Import:
    """A module whose import is timed."""

    module: str

    def measure(self, revision: Revision, folder: Path, renamed: Mapping[str, str]) -> Measured:
        """Imports it in new processes.  Raises: CommandError."""
        words = ["-c", f"import {self.module}"]
        used = [finish_measured(revision.python(words, folder), folder) for _ in range(IMPORTS)]
        return Measured({"cpu": median(each.cpu_seconds for each in used)})


def workloads(task: Path, is_quick: bool) -> dict[str, Workload | Import]:
    """The workloads by name. Weights of `long` stay as they are, so that its answers are as long on both commits."""
    data = (f"data.train_files={task}/train.jsonl", "trainer.val_freq=-1", "trainer.logger=[jsonl]", *SAME)
    length, steps = (16, 4) if is_quick else (128, 8)
    return {
        "long": Workload(
            (
                *("train", "quickstart", f"model.path={task}/tiny", *data, f"trainer.total_steps={steps}"),
                *("data.train_batch_size=8", "actor.optim.lr=0", "algorithm.filter.name=null"),
                f"data.max_response_length={length}",
            ),
            ("time/rollout", "time/update"),
        ),
        "quickstart": Workload(
            (
                *("train", "quickstart", f"model.path={task}/nano", *data),
                *(f"trainer.total_steps={4 if is_quick else 40}", "algorithm.filter.name=null"),
            ),
            ("time/step",),
        ),
        "import": Import("whet"),
        "child": Import("whet.processes.template"),
    }


@dataclass(frozen=True)
class Measured:
    """The measurements of a workload: seconds by name of the time, and its peak of resident memory. Linux counts a
    process from the size of the one that starts it, so that short ones have no peak."""

    seconds: Mapping[str, float]
    peak_bytes: int = 0


def lower_bound(ratios: Sequence[float], confidence: float = CONFIDENCE) -> float | None:
    """A bound below the median of the sampled distribution with this probability, whatever the distribution; None with
    too few ratios for any.

    It is the k-th smallest ratio, k the largest with P(fewer than k of n fair coins fall heads) <= 1 - confidence.
    """
    below, k = 0.0, 0
    for heads in range(len(ratios)):
        below += math.comb(len(ratios), heads) / 2 ** len(ratios)
        if below > 1 - confidence:
            break
        k = heads + 1
    return sorted(ratios)[k - 1] if k else None


def is_slower(ratios: Sequence[float]) -> bool:
    """Tells whether the lower bound of the median ratio exceeds the allowed one."""
    bound = lower_bound(ratios)
    return bound is not None and bound > MOST_SLOWER


def is_larger(before: float, after: float) -> bool:
    """Whether a peak of memory grew by more than both limits."""
    return after > before * (1 + MOST_MEMORY_SHARE) and after - before > MOST_MEMORY_BYTES


def seconds_of(run_dir: Path, names: Sequence[str], renamed: Mapping[str, str] | None = None) -> dict[str, float]:
    """The median over the steps after the first ones of each time in timings.jsonl."""
    lines = [json.loads(line) for line in (run_dir / "timings.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > WARM_UP_STEPS]
    other = renamed or {}
    return {name: median(line[other.get(name, name)] for line in steps) for name in names}


def prepare(revision: Revision, folder: Path) -> None:
    """Makes data and two models with random weights."""
    write_additions(folder)
    for size in ("nano", "tiny"):
        revision.whet(["init-model", str(folder / size), "--size", size], folder / "log_models")


def main(words: Sequence[str] | None = None) -> int:
    """Compares the commits that the command line names.  Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks same_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--before", required=True, help="commit, or a folder with its files")
    parser.add_argument("--after", default=WORKING_TREE, help="commit or folder; by default the working tree")
    parser.add_argument("--pairs", type=int, default=9, help="runs of each workload on each commit")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that all works")
    parser.add_argument("--only", nargs="*", default=[], help="names of workloads: long, quickstart, import, child")
    chosen = parser.parse_args(words)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory(prefix="whet-speed-") as scratch:
        folder = Path(scratch).resolve()
        before = check_out(chosen.before, folder / "tree_before")
        after = check_out(chosen.after, folder / "tree_after", RENAMED_KEYS)
        prepare(before, folder / "task")
        started, others, all_well = time.monotonic(), OthersClock(), True
        offered = workloads(folder / "task", chosen.quick)
        if unknown := [name for name in chosen.only if name not in offered]:
            parser.error(f"--only {unknown[0]}; expected names of {', '.join(offered)}")
        for name in chosen.only or offered:
            workload = offered[name]
            all_well &= report(name, take_pairs(name, before, after, workload, folder, chosen.pairs))
        busy = others.share()
    print(f"{before.name} against {after.name}: {'as fast' if all_well else 'NOT AS FAST'}, ", end="")
    print(f"{time.monotonic() - started:.0f} s; others took {busy:.0%} of the cores")
    if busy > BUSY:
        print("The machine was busy with other work: these times are worth little.")
    return 0 if all_well else 1


def take_pairs(
    name: str, before: Revision, after: Revision, workload: Workload | Import, folder: Path, pairs: int
) -> list[tuple[Measured, Measured]]:
    """Runs both commits in turn, each first in every other pair, after a run of each that does not count."""
    sides = {"before": (before, {}), "after": (after, RENAMED_TIMES)}
    measured = []
    for number in range(pairs + 1):
        order = ("before", "after") if number % 2 else ("after", "before")
        taken = {side: workload.measure(sides[side][0], folder / side, sides[side][1]) for side in order}
        measured.append((taken["before"], taken["after"]))
        log.info("%s: pair %d of %d", name, number, pairs)
    return measured[1:]


def report(name: str, pairs: Sequence[tuple[Measured, Measured]]) -> bool:
    """Prints a line for each time and one for memory.  Returns whether all are within their limits."""
    all_well = True
    for time_name in pairs[0][0].seconds:
        ratios = [after.seconds[time_name] / before.seconds[time_name] for before, after in pairs]
        bound = lower_bound(ratios)
        told = "too few pairs for a bound" if bound is None else f"above {bound:.3f} at {CONFIDENCE:.0%}"
        taken = [median(each.seconds[time_name] for each in side) for side in zip(*pairs, strict=True)]
        verdict = "SLOWER" if is_slower(ratios) else "ok"
        all_well &= not is_slower(ratios)
        print(
            f"{name:11} {time_name:13} {taken[0] * 1e3:8.1f} ms before {taken[1] * 1e3:8.1f} ms after  "
            f"ratio {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), {told}: {verdict}",
            flush=True,
        )
    before, after = (median(each.peak_bytes for each in side) for side in zip(*pairs, strict=True))
    if not before:
        return all_well
    verdict = "MORE MEMORY" if is_larger(before, after) else "ok"
    sizes = f"{before / 2**20:8.0f} MiB before {after / 2**20:7.0f} MiB after"
    print(f"{name:11} peak memory   {sizes}: {verdict}", flush=True)
    return all_well and not is_larger(before, after)
