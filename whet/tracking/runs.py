# SPDX-License-Identifier: Apache-2.0
"""Reads the folders of runs, finished or still running: state, config and metrics.

The run writes run.json: its state, the number of its steps, its error."""

from __future__ import annotations

import difflib
import fcntl
import json
import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import yaml

from whet import files
from whet.config.commands import likely_command
from whet.errors import DataError
from whet.options import is_number
from whet.tracking.tracker import METRIC_FILES, read_records, with_nan

STATE, CONFIG, INPUTS, LOCK = "run.json", "config.yaml", "inputs.json", ".lock"
COMMAND = "command"  # the key in INPUTS of the trainer's command
# ended: the run is of an older version, which wrote no state; not begun: a run of a sweep
State = Literal["running", "finished", "stopped", "failed", "killed", "ended", "not begun"]
# The panels of `whet plot` and `whet view`, and the rows of a run's end: each is the first of these metrics that a run
# has; -: lower is better, ~: neither is.
MAIN = (
    ("filter/sampled_score", "critic/score/mean"),
    ("filter/sampled_accuracy", "reward/accuracy"),
    ("val/accuracy",),
    ("val/reward",),
    ("-*/loss",),  # supervised and preference trainers: sft/loss, ...
    ("-val/loss",),
    ("reward_model/accuracy",),
    ("~response_length/mean",),
    ("~actor/entropy",),
    ("~actor/grad_norm",),
    ("perf/throughput",),
)
BEST = ("val/accuracy", "-val/loss", "filter/sampled_score", "critic/score/mean", "-*/loss")


@dataclass(frozen=True)
class RunFolder:
    """A run, as read from its folder."""

    path: Path
    config: Mapping[str, Any]
    state: State
    total_steps: int | None
    error: str  # first line of the error that ended a failed run
    records: list[dict[str, float]]  # metrics and timings of each step, with `step`; NaN where a file has null
    command: str = ""  # the trainer's command

    @property
    def step(self) -> int:
        """The number of steps done. Without the tracker `jsonl` it comes from the run's end or newest checkpoint."""
        if self.records:
            return int(self.records[-1]["step"])
        saved = (each.name.rpartition("_")[2] for each in (self.path / "checkpoints").glob("global_step_*"))
        done = self.total_steps if self.state == "finished" else None
        return done or max((int(step) for step in saved if step.isdecimal()), default=0)

    @property
    def metrics(self) -> list[str]:
        """The names of all metrics, sorted."""
        return sorted({name for record in self.records for name in record} - {"step"})

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """Returns the steps that have a metric, and its values. Steps with NaN are left out."""
        points = [(r["step"], x) for r in self.records if is_number(x := r.get(metric)) and x == x]
        return [step for step, _ in points], [value for _, value in points]

    @property
    def best_metric(self) -> str:
        """The metric that selects the best checkpoint; if it was not logged, the first usual metric that was. A leading
        minus means that lower is better."""
        chosen = (self.config.get("trainer") or {}).get("best_metric")
        known = {name for record in self.records for name in record}
        usual = next(filter(None, (first_of([name], known) for name in BEST)), BEST[0])
        return chosen if chosen and str(chosen).removeprefix("-") in known else usual

    def best(self, metric: str) -> tuple[float, int] | None:
        """Returns the best value of a metric and its first step, or None. With a leading minus, the lowest is best."""
        pick = min if metric.startswith("-") else max
        steps, values = self.curve(metric.removeprefix("-"))
        found = pick(values, default=None)
        return None if found is None else (found, int(steps[values.index(found)]))


def write_state(folder: Path, state: State, total_steps: int | None = None, error: BaseException | None = None) -> None:
    """Writes the state of a run to its folder."""
    said = "" if error is None else f"{type(error).__name__}: {error}".partition("\n")[0]
    files.write(folder / STATE, json.dumps({"state": state, "total_steps": total_steps, "error": said}) + "\n")


def is_run(folder: Path) -> bool:
    """Tells whether a folder is a run's folder. (whet's first version wrote no inputs.json.)"""
    return (folder / CONFIG).is_file() and any((folder / name).exists() for name in (INPUTS, *METRIC_FILES))


def find_runs(folder: Path) -> list[Path]:
    """Finds the run folders in a folder and its subfolders, sorted by path. Folders inside a run are not searched."""
    found = []
    for place, folders, _ in os.walk(folder):
        if is_run(Path(place)):
            found.append(Path(place))
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
    return sorted(found)


def read_run(folder: Path) -> RunFolder:
    """Reads a run's folder.  Raises: DataError if it is not a run's folder, or if a file in it is damaged."""
    if not is_run(folder):
        near = ", ".join(map(str, find_runs(folder)[:5])) if folder.is_dir() else ""
        what = "not the folder of a run" if folder.exists() else "does not exist"
        hint = f"did you mean {near}?" if near else "find the runs in a folder with `whet runs FOLDER`"
        raise DataError(str(folder), what, f"a folder with {CONFIG} and {INPUTS}", hint)
    try:
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
        noted, inputs = (
            json.loads(f.read_bytes()) if (f := folder / name).is_file() else {} for name in (STATE, INPUTS)
        )
        if not all(isinstance(each, dict) for each in (config, noted, inputs)):
            raise ValueError("not a mapping")
    except (ValueError, OSError, RecursionError, yaml.YAMLError) as error:
        found = f"a damaged {CONFIG}, {STATE} or {INPUTS} ({error})"
        raise DataError(str(folder), found, change="restore the file") from error
    was, steps = noted.get("state", "ended"), noted.get("total_steps")
    state: State = "running" if is_locked(folder) else "killed" if was == "running" else was
    command = str(inputs.get(COMMAND) or likely_command(config))
    return RunFolder(folder, config, state, steps, str(noted.get("error") or ""), read_steps(folder), command)


def is_locked(folder: Path) -> bool:
    """Tells whether a live process holds the lock of a run's folder."""
    try:
        with os.fdopen(os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # the file may be a pipe
            owner = file.read(4096).split()  # "process PID on HOST"
            if owner[-1:] == [socket.gethostname().encode()]:
                os.kill(int(owner[1]), 0)  # raises if the process has ended: then no lock is taken, even for a moment
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # closing the file releases the lock at once
    except BlockingIOError:
        return True
    except (OSError, ValueError, IndexError):  # no such file or process, or a file system without locks
        pass
    return False


def main_metrics(runs: Sequence[RunFolder]) -> list[str]:
    """Returns the metrics of `MAIN` that any run has, then the metrics by which runs select their best checkpoints."""
    found = main_names({name for run in runs for name in run.metrics}, lambda name: [run.curve(name) for run in runs])
    also = (run.best_metric for run in runs if run.best_metric.lstrip("-") in run.metrics)
    return found + [name for name in dict.fromkeys(also) if name not in found]


def main_names(known: Collection[str], curve: Callable[[str], object]) -> list[str]:
    """Returns the metrics of `MAIN` among `known`, without metrics whose curve equals the curve of an earlier one."""
    rows = [first_of(names, known) for names in MAIN]
    curves = [curve(name.lstrip("-~")) if name else None for name in rows]
    return [name for at, name in enumerate(rows) if name and curves[at] not in curves[:at]]


def first_of(patterns: Iterable[str], known: Collection[str]) -> str:
    """Returns the first known metric of `patterns`, a row of `MAIN` or `BEST`, with its sign; "" if none is known."""
    pairs = ((pattern, pattern.lstrip("-~")) for pattern in patterns)
    found = [(row.removesuffix(name), each) for row, name in pairs for each in sorted(known) if fnmatchcase(each, name)]
    first = min(found, key=lambda each: each[1] == "val/loss", default=("", ""))  # any other loss comes first
    return "".join(first)


def chosen_metrics(runs: Iterable[RunFolder], patterns: Iterable[str]) -> list[str]:
    """Returns the metrics of the runs that match names or patterns (`val/*`), in the order of the patterns.

    Raises: DataError naming the nearest metrics if a pattern matches none."""
    known = sorted({name for run in runs for name in run.metrics})
    chosen: list[str] = []
    for pattern in patterns:
        found = [name for name in known if name == pattern or fnmatchcase(name, pattern)]
        if not found:
            raise unknown("metric", pattern, known, nearest(pattern, known))
        chosen += [name for name in found if name not in chosen]
    return chosen


def unknown(what: str, name: str, known: Iterable[str], near: Sequence[str]) -> DataError:
    """Returns the error for an unknown name; `what` is the thing named. Lists the names `near` it, or all names."""
    hint = f"did you mean {' or '.join(near)}?" if near else ""
    return DataError(what, name, "" if near else f"one of {', '.join(known)}", hint)


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Finds up to three known names that resemble `name` or contain it."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return list(dict.fromkeys([*close, *(each for each in names if name.lower() in each.lower())]))[:3]


def short_names(folders: Iterable[Path]) -> list[str]:
    """Returns a short name for each folder: as many last parts of its path as distinguish the folders."""
    parts = [folder.absolute().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(set(parts)):
            break
    return names if parts else []


def read_steps(folder: Path) -> list[dict[str, float]]:
    """Reads metrics and timings of each step as one record, in the order of steps."""
    merged: dict[int, dict[str, float]] = {}
    for name in METRIC_FILES:
        if (folder / name).is_file():
            for record in read_records(folder / name):
                merged.setdefault(record["step"], {}).update(with_nan(record))
    return [merged[step] for step in sorted(merged)]
