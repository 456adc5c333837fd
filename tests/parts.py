# SPDX-License-Identifier: Apache-2.0
"""The parts of the slow tests: which there are, which are due and why, and when each last ran whole.

    python tests/parts.py                      the table: part, last whole run, whether it is due and why
    python tests/parts.py due --minutes 18     names of parts that fit into the time, due ones before the rotating share
    python tests/parts.py run peers            runs a part's tests
    python tests/parts.py run peers --record   ... and writes the date and the commit into LOG.md if all ran and passed

A part is due where LOG.md has no commit of its last whole run, or where files that it watches changed since that
commit. tests/parts.toml says what the parts are. This needs Python alone, no package.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / "LOG.md"
GATES = ("gate", "gate-trainers")  # parts that always run
ACCELERATOR = re.compile("CUDA|accelerator")  # in the reason of a skipped test: no machine without one can run it
HEADER = "| part | last whole run | commit |\n|---|---|---|\n"
ROW = re.compile(r"^\| ([a-z0-9-]+) \| ([\d-]+) \| ([0-9a-f]{7,40}) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """Test files whose slow tests are run together."""

    name: str
    files: Sequence[str]
    watches: Sequence[str]
    minutes: int
    make: str | None = None  # target of the Makefile that must be there first
    venv: str | None = None  # folder of the virtual environment whose interpreter runs the tests; None: this one
    processes: int = 2  # that run tests at the same time


def load_parts() -> dict[str, Part]:
    """The parts of tests/parts.toml by name."""
    table = tomllib.loads((ROOT / "tests" / "parts.toml").read_text(encoding="utf-8"))
    return {name: Part(name, **entry) for name, entry in table.items()}


def last_runs(log: str) -> dict[str, tuple[str, str]]:
    """Date and commit of each part's last whole run, from the table in the text of LOG.md."""
    start, end = _table(log)
    return {name: (date, commit) for name, date, commit in ROW.findall(log[start:end])}


def with_run(log: str, name: str, date: str, commit: str) -> str:
    """The text of LOG.md with a part's row written or replaced, the rows sorted by name."""
    start, end = _table(log)
    rows = {**last_runs(log), name: (date, commit)}
    return log[:start] + "".join(f"| {part} | {' | '.join(rows[part])} |\n" for part in sorted(rows)) + log[end:]


def _table(log: str) -> tuple[int, int]:
    """Where the rows of the table begin and end."""
    end = start = log.index(HEADER) + len(HEADER)
    while log.startswith("|", end):
        end = log.index("\n", end) + 1
    return start, end


def reason_due(part: Part, last: tuple[str, str] | None, changed: Sequence[str] | None) -> str | None:
    """A sentence on why a part is due, None where it is not. `changed`: files since its last run; None: unknown."""
    if last is None:
        return "no whole run is recorded"
    if changed is None:
        return f"commit {last[1]} of its last run is not in this clone"
    seen = [path for path in changed if path.startswith(tuple(part.watches)) or path in part.files]
    if not seen:
        return None
    more = f" and {len(seen) - 1} more" if len(seen) > 1 else ""
    return f"{seen[0]}{more} changed since {last[1]}"


def choose(parts: Mapping[str, Part], due: Mapping[str, str | None], minutes: float, turn: int) -> list[str]:
    """Names of long parts that fit into the minutes: first parts that are due, then the others; both start with another
    part at another turn, so that all run in time."""
    names = sorted(parts.keys() - {*GATES})
    shift = turn % len(names) if names else 0
    rotated = names[shift:] + names[:shift]
    chosen = []
    for name in sorted(rotated, key=lambda name: due[name] is None):  # stable: the rotation stays
        if parts[name].minutes <= minutes and (due[name] is not None or not _is_full(chosen, due)):
            chosen.append(name)
            minutes -= parts[name].minutes
    return chosen


def _is_full(chosen: Sequence[str], due: Mapping[str, str | None]) -> bool:
    """Whether the rotating share, one part that is not due, is there."""
    return any(due[name] is None for name in chosen)


def changed_since(commit: str) -> list[str] | None:
    """Files that differ between a commit and the working tree; None where git does not know the commit."""
    told = subprocess.run(["git", "diff", "--name-only", commit], cwd=ROOT, capture_output=True, text=True, check=False)
    return None if told.returncode else told.stdout.splitlines()


def look(parts: Mapping[str, Part]) -> dict[str, str | None]:
    """The reason why each part is due, or None, by name."""
    last = last_runs(LOG.read_text(encoding="utf-8"))
    changed = {name: changed_since(last[name][1]) if name in last else None for name in parts}
    return {name: reason_due(part, last.get(name), changed[name]) for name, part in parts.items()}


def run(part: Part, is_recorded: bool) -> int:
    """Runs the slow tests of a part in its processes of one thread each.  Returns pytest's exit status."""
    if part.make is not None:
        subprocess.run(["make", part.make], cwd=ROOT, check=True)
    words = ["-m", "pytest", "-m", "slow", "-n", str(part.processes), "--dist", "worksteal", *part.files]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [interpreter(part), *words, f"--junitxml={report}"]
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode
        skipped = reasons_skipped(report.read_text(encoding="utf-8")) if status == 0 else []
    if status == 0 and is_recorded:
        if skipped:
            sys.exit(f"not recorded: {len(skipped)} tests were skipped, so the part did not run whole: {skipped[0]}")
        if _git("status", "--porcelain", "--untracked-files=no"):
            sys.exit("not recorded: the working tree has changes, and the commit would not say what ran; commit first")
        today, commit = datetime.now(UTC).date().isoformat(), _git("rev-parse", "--short=7", "HEAD")
        LOG.write_text(with_run(LOG.read_text(encoding="utf-8"), part.name, today, commit), encoding="utf-8")
    return status


def interpreter(part: Part) -> str:
    """The Python that has the packages of a part's tests."""
    return sys.executable if part.venv is None else str(ROOT / part.venv / "bin" / "python")


def reasons_skipped(report: str) -> list[str]:
    """The reasons why tests of a JUnit report were skipped, except tests that need an accelerator."""
    reasons = [each.get("message", "") for each in ET.fromstring(report).iter("skipped")]
    return [reason for reason in reasons if not ACCELERATOR.search(reason)]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def show(parts: Mapping[str, Part]) -> None:
    """Prints the table."""
    last, due = last_runs(LOG.read_text(encoding="utf-8")), look(parts)
    for name, part in sorted(parts.items()):
        ran = " ".join(last[name]) if name in last else "not recorded"
        told = "the gate: always" if name in GATES else f"due: {due[name]}" if due[name] else "not due"
        sys.stdout.write(f"{name:13} {part.minutes:3} min  {ran:20} {told}\n")


def main() -> int:
    """Runs the command line.  Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    due = commands.add_parser("due", help="names of the parts to run")
    due.add_argument("--minutes", type=float, default=float("inf"), help="the time that there is")
    running = commands.add_parser("run", help="run a part")
    running.add_argument("part", choices=load_parts())
    running.add_argument("--record", action="store_true", help="write date and commit into LOG.md if all passed")
    asked = commands.add_parser("minutes", help="the minutes that a part takes, roughly")
    asked.add_argument("part", choices=load_parts())
    chosen, parts = parser.parse_args(), load_parts()
    if chosen.command == "minutes":
        sys.stdout.write(f"{parts[chosen.part].minutes}\n")
        return 0
    if chosen.command == "run":
        return run(parts[chosen.part], chosen.record)
    if chosen.command == "due":
        turn = int(_git("rev-parse", "HEAD")[:8], 16)
        sys.stdout.write("".join(f"{name}\n" for name in choose(parts, look(parts), chosen.minutes, turn)))
        return 0
    show(parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
