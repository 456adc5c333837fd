# SPDX-License-Identifier: Apache-2.0
"""Failing schedules: found, kept in files, replayed and shrunk."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.simulation.plan import Plan
from tests.simulation.world import World

FOLDER = Path(__file__).resolve().parents[2] / "runs" / "simulation"
KEPT = Path(__file__).with_name("kept")  # schedules that once failed, which every test run replays


def failure(plan: Plan) -> str | None:
    """The error of a schedule; None where all invariants hold."""
    level = logging.getLogger("whet").level
    logging.getLogger("whet").setLevel(logging.ERROR)
    try:
        World(plan).run()
    except Exception as error:  # whatever breaks is a finding
        return f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger("whet").setLevel(level)
    return None


def failures(seeds: Iterable[int]) -> Iterator[tuple[Plan, str]]:
    """The schedules of these seeds that fail, with their errors."""
    for seed in seeds:
        if (error := failure(Plan.of(seed))) is not None:
            yield Plan.of(seed), error


def keep(plan: Plan, error: str, folder: Path | None = None) -> Path:
    """Writes a failing schedule into a file, to be replayed."""
    folder = folder or FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"seed-{plan.seed}.json"
    path.write_text(json.dumps({"error": error, "plan": plan.to_json()}, indent=1) + "\n")
    return path


def read(path: Path) -> Plan:
    """The schedule of a file."""
    return Plan.from_json(json.loads(path.read_text())["plan"])


def kind_of(error: str) -> str:
    """The error without its details: the number of the invariant, or the type of the exception."""
    return ":".join(error.split(":")[: 2 if error.startswith("InvariantError") else 1])


def shrink(plan: Plan, error: str) -> tuple[Plan, str]:
    """A smaller schedule with an error of the same kind: one thing less at a time, while it still fails."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in plan.smaller():
            found = failure(smaller)
            if found is not None and kind_of(found) == kind_of(error):
                plan, error, is_smaller = smaller, found, True
                break
    return plan, error
