# SPDX-License-Identifier: Apache-2.0
"""The runs below a folder, and the curves of their metrics, which are read on from the last byte."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from whet.tracking.runs import CONFIG, STATE, State, is_locked, main_names
from whet.viewer.records import inside, is_number

METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"
INSIDE = {"checkpoints", "media", "profile", "rollouts", "tokens"}  # folders of a run, in which there is no other run
MAX_STEP = 2**53  # beyond it a page cannot tell numbers apart
MAX_DEPTH = 5  # of a run below the folder
LIVE_SECONDS = 90.0  # since the last line, of a run that has steps left
Curve = tuple[list[int], list[float]]  # steps and values, in the order of steps


class CurvesFile:
    """The curves of a JSONL file of metrics, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.curves: dict[str, Curve] = {}
        self.last_step = 0
        self._offset, self._inode = 0, -1
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Reads the lines that were appended, or all where the file was replaced, as a resumed run does. Leaves out an
        incomplete last line, and lines that are no objects."""
        with self._lock:
            try:
                stat = self.path.stat()
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self.curves, self.last_step = {}, 0
                    self._offset, self._inode = 0, stat.st_ino
                if stat.st_size == self._offset:
                    return
                with inside(self.path.parent, self.path).open("rb") as file:
                    file.seek(self._offset)
                    content = file.read()
            except (OSError, LookupError):
                return
            whole = content[: content.rfind(b"\n") + 1]
            self._offset += len(whole)
            for line in whole.splitlines():
                self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            step = int(record.pop("step"))
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError):
            return
        if not 0 <= step <= MAX_STEP:
            return
        self.last_step = step
        for name, value in record.items():
            if is_number(value):
                steps, values = self.curves.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)


class Curves:
    """The curves of a run: of its metrics and of its timings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = (CurvesFile(folder / METRICS), CurvesFile(folder / TIMINGS))

    def refresh(self) -> None:
        """Reads what the run has written since."""
        for file in self.files:
            file.refresh()

    def names(self) -> list[str]:
        """The names of all metrics."""
        return sorted({name for file in self.files for name in list(file.curves)})

    def main(self) -> list[str]:
        """The metrics that `whet plot` draws too, in its order."""
        found = main_names(self.names(), lambda name: self._named([name]).get(name))
        return [name.lstrip("-~") for name in found]

    def points(self, names: Sequence[str], most: int) -> dict[str, object]:
        """Returns steps and values of metrics that the run has, each thinned to about `most` points."""
        return {name: thinned(*curve, most) for name, curve in self._named(names).items()}

    def seconds(self, names: Sequence[str], most: int) -> dict[str, object]:
        """Returns metrics that add up, at the same steps: sums over at most `most` stretches of `width` steps."""
        found = self._named(names)
        width = max(1, -(-max((steps[-1] + 1 for steps, _ in found.values()), default=1) // most))
        starts = sorted({step // width for steps, _ in found.values() for step in list(steps)})
        place = {start: at for at, start in enumerate(starts)}
        sums = {name: [0.0] * len(starts) for name in found}
        for name, (steps, values) in found.items():
            for step, value in zip(list(steps), list(values), strict=False):
                if step // width in place:  # a line may come in between
                    sums[name][place[step // width]] += value
        return {"width": width, "steps": [start * width for start in starts], "sums": sums}

    def _named(self, names: Sequence[str]) -> dict[str, Curve]:
        return {name: curve for file in self.files for name, curve in list(file.curves.items()) if name in names}

    def summary(self) -> dict[str, object]:
        """The last step, the number of steps of the config (None: unknown), state and error of run.json, and whether
        the run goes on: its state is "running", and its files have changed in the last 90 seconds or a process holds
        its lock. Without run.json the state is "", and a run with steps left goes on if its files have changed."""
        step = max(file.last_step for file in self.files)
        try:
            config = inside(self.folder, self.folder / CONFIG).read_text("utf-8")
            [total] = map(int, re.findall(r"^  total_steps: (\d{1,15})$", config, re.M)[:1])
        except (OSError, ValueError, LookupError):
            total = None
        ages = [time.time() - path.stat().st_mtime for path in (file.path for file in self.files) if path.exists()]
        is_young = bool(ages) and min(ages) < LIVE_SECONDS
        state, error, noted = _noted_state(self.folder / STATE)
        total = total if noted is None else noted  # a run may end earlier than its config says
        is_live = is_young and (total is None or step < total)
        if state == "running":
            is_live = is_young or is_locked(self.folder)
            state = "running" if is_live else "killed"
        is_live = is_live and state in ("", "running")
        return {"step": step, "total": total, "state": state, "error": error, "live": is_live}


def _noted_state(path: Path) -> tuple[str, str, int | None]:
    """The state that a run has noted, the error that ended it, and its steps; "", "", None where the file has none."""
    try:
        noted = json.loads(inside(path.parent, path).read_bytes())
        steps = noted.get("total_steps")
        if noted["state"] in get_args(State):
            return noted["state"], str(noted.get("error") or ""), steps if type(steps) is int else None
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        pass
    return "", "", None


def thinned(x: Sequence[int], y: Sequence[float], most: int) -> tuple[list[int], list[float]]:
    """Returns about `most` points of a curve: least and largest of each stretch, and both ends: no peak is lost."""
    if len(x) <= most:
        return list(x), list(y)
    stretch = -(-2 * len(x) // most)
    kept = {0, len(x) - 1}
    for start in range(0, len(x), stretch):
        places = range(start, min(start + stretch, len(x)))
        kept |= {min(places, key=y.__getitem__), max(places, key=y.__getitem__)}
    return [x[i] for i in sorted(kept)], [y[i] for i in sorted(kept)]


def find_runs(root: Path) -> dict[str, Path]:
    """The folders of runs, at `root` and below, by their paths below it ("." for itself); links are not followed."""
    found: dict[str, Path] = {}
    for place, folders, files in os.walk(root):
        path = Path(place)
        name = path.relative_to(root).as_posix()
        if METRICS in files or "rollouts" in folders:
            found[name] = path
            folders[:] = [each for each in folders if each not in INSIDE]
        if len(path.relative_to(root).parts) >= MAX_DEPTH:
            folders.clear()
        folders[:] = sorted(each for each in folders if not each.startswith("."))
    return found
