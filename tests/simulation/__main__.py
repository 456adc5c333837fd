# SPDX-License-Identifier: Apache-2.0
"""Simulates schedules of asynchronous rollouts, and replays and shrinks one that failed.

python -m tests.simulation --count 20000              tries the seeds 0 to 19,999; failing ones go to runs/simulation/
python -m tests.simulation --seed 17 [--shrink]       replays a seed
python -m tests.simulation --file runs/simulation/seed-17.json [--shrink]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.simulation.failing import failure, failures, keep, read, shrink
from tests.simulation.plan import Plan


def main() -> int:
    """Runs the command.  Returns 1 where a schedule failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="seeds to try")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="replays this seed alone")
    parser.add_argument("--file", type=Path, help="replays the schedule of a file")
    parser.add_argument("--shrink", action="store_true", help="finds a smaller schedule that fails in the same way")
    options = parser.parse_args()
    if options.seed is None and options.file is None:
        return sweep(options.first, options.count)
    plan = read(options.file) if options.file is not None else Plan.of(options.seed)
    error = failure(plan)
    sys.stdout.write(f"{plan}\n{error or 'all invariants hold'}\n")
    if error is None:
        return 0
    if options.shrink:
        plan, error = shrink(plan, error)
        sys.stdout.write(f"smaller: {plan}\n{error}\n")
    sys.stdout.write(f"kept in {keep(plan, error)}\n")
    return 1


def sweep(first: int, count: int) -> int:
    """Tries seeds.  Returns 1 where one failed."""
    began, failed = time.process_time(), 0
    for plan, error in failures(range(first, first + count)):
        failed += 1
        sys.stdout.write(f"seed {plan.seed}: {error}\n  kept in {keep(plan, error)}\n")
        sys.stdout.flush()
    seconds = time.process_time() - began
    sys.stdout.write(f"{count} schedules from seed {first}, {failed} failed, {seconds:.0f} CPU seconds\n")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
