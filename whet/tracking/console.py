# SPDX-License-Identifier: Apache-2.0
"""The console tracker: prints one line a step with the main metrics.

On a terminal the lines have columns; elsewhere (a log file, CI) each number has its name."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from statistics import fmean

from rich.console import Console
from rich.text import Text

from whet.tracking.tracker import NO_TABLES, Tables

HEADER_EVERY = 20  # lines


@dataclass(frozen=True)
class Column:
    """A column of the step lines: its title, and the metrics that it shows: the first that the step has, of a pattern
    the `reduce` of all. It stays hidden until its number differs from `unless`: a number, or another column's title."""

    title: str
    metrics: tuple[str, ...]
    form: str  # format specification
    unless: float | str | None = None
    reduce: Callable[[list[float]], float] = math.fsum
    width: int = 8  # on a terminal, at least; 13 columns fit 120 characters

    def number(self, metrics: Mapping[str, float]) -> float | None:
        """The number of a step."""
        for pattern in self.metrics:
            if found := [value for name, value in metrics.items() if fnmatchcase(name, pattern)]:
                return self.reduce(found)
        return None


USE = (  # of the machine, by every trainer
    Column("tokens/s", ("perf/throughput",), ",.0f"),
    Column("MFU", ("perf/mfu",), ".1%", width=6),
    Column("GiB", ("system/*/memory_gib",), ".2f", width=7),  # resident memory of all processes
    Column("cores", ("system/*/cpu_cores",), ".1f", width=5),  # processor cores in use by all processes
    Column("GPU GiB", ("system/*/accelerator_gib",), ".2f", width=7),
    Column("GPU use", ("system/*/accelerator_use",), ".0%", reduce=fmean, width=7),  # mean over accelerators
)
COLUMNS = (
    Column("reward", ("filter/sampled_score", "critic/score/mean"), ".3f"),  # mean over all sampled trajectories
    Column("kept", ("critic/score/mean",), ".3f", unless="reward"),  # mean over those that a filter kept
    Column("accuracy", ("filter/sampled_accuracy", "reward/accuracy"), ".3f", unless="reward"),
    Column("stale", ("staleness/mean",), ".2f", width=5),  # versions between sampling and training
    Column("length", ("response_length/mean",), ".1f"),
    Column("KL", ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"), ".2e", unless=0.0),
    Column("grad norm", ("actor/grad_norm",), ".3f"),
    *USE,
)
NOTES = {  # explain names where they first stand
    "kept": "the mean reward of the groups that algorithm.filter keeps to train on; reward is that of all sampled ones",
    "reward_gap": "the reward in training, as a share of its range, less the held-out accuracy: one that grows is a "
    "sign that the reward pays for something else than right responses",
}
VALIDATION = "val/"  # prefix of the metrics of a validation, which have a line of their own


class ConsoleTracker:
    """Prints a line a step: the step, the columns that are not hidden, and the remaining time.

    The remaining time assumes the mean pace of this process, with the time between steps, up to `likely_steps`, where
    a run is expected to stop early; from there on up to `total_steps`."""

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        likely_steps: int | None = None,
        columns: tuple[Column, ...] = COLUMNS,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps, self._first_step, self._columns = total_steps, first_step, columns
        self._likely_steps = likely_steps or total_steps
        self._console = console or shared_console()
        self._clock, self._started = clock, clock()
        self._lines = 0
        self._shown: set[str] = set()  # titles of the columns that are no longer hidden
        self._notes = dict(NOTES)  # not told yet

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        """Prints the line of a step, and one for a validation; tables are ignored."""
        numbers = {column.title: column.number(metrics) for column in self._columns}
        if any(number is not None for number in numbers.values()):
            self._print_step(step, numbers)
        if validated := _validated(metrics):
            listed = "  ".join(f"{name} {value:.4g}" for name, value in validated.items())
            self._console.print(Text(f"step {step} validation  {listed}", style="green"), soft_wrap=True)
        for name in self._notes.keys() & {*self._shown, *validated}:
            self._console.print(Text(f"({name}: {self._notes.pop(name)})", style="dim"), soft_wrap=True)

    def close(self, failed: bool = False) -> None:
        """Does nothing: every line is printed at once."""

    def _print_step(self, step: int, numbers: Mapping[str, float | None]) -> None:
        before = len(self._shown)
        for column in self._columns:
            other = numbers[column.unless] if isinstance(column.unless, str) else column.unless
            number = numbers[column.title]
            if number is not None and (other is None or not math.isclose(number, other)):  # means differ by rounding
                self._shown.add(column.title)
        columns = [column for column in self._columns if column.title in self._shown]
        titles = ["step", *(column.title for column in columns), "left"]
        found = [numbers[column.title] for column in columns]
        shown = ["" if n is None else format(n, column.form) for n, column in zip(found, columns, strict=True)]
        cells = [f"{step}/{self._total_steps}", *shown, self._time_left(step)]
        if self._console.is_terminal:
            widths = [8, *(max(len(column.title), column.width) for column in columns), 8]
            if self._lines % HEADER_EVERY == 0 or len(self._shown) > before:
                self._lines = 0
                self._console.print(Text(_aligned(titles, widths), style="dim"), soft_wrap=True)
            line = _aligned(cells, widths)
        else:
            line = "  ".join(f"{title} {cell}" for title, cell in zip(titles, cells, strict=True) if cell)
        self._console.print(Text(line), soft_wrap=True)
        self._lines += 1

    def _time_left(self, step: int) -> str:
        done = step - self._first_step
        if done <= 0:
            return ""
        last = self._likely_steps if step < self._likely_steps else self._total_steps
        return clock_time((self._clock() - self._started) / done * (last - step))


def _validated(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a validation to show: without zero failures, without a reward that equals the accuracy,
    and without those by data source if there is only one."""
    found = {name.removeprefix(VALIDATION): value for name, value in metrics.items() if name.startswith(VALIDATION)}
    if found.get("failures") == 0:
        del found["failures"]
    sources = {name.rpartition("/")[0] for name in found} - {""}
    shown = {}
    for name, value in found.items():
        source, _, metric = name.rpartition("/")
        accuracy = found.get(f"{source}/accuracy".lstrip("/"))
        is_repeated = len(sources) == 1 and bool(source) and metric in found
        if not is_repeated and not (metric == "reward" and accuracy is not None and math.isclose(value, accuracy)):
            shown[name] = value
    return shown


def clock_time(seconds: float) -> str:
    """A duration as h:mm:ss, or m:ss below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


@cache
def shared_console() -> Console:
    """The console of the process. Lines and progress bars must use the same object, or they overwrite each other."""
    return Console(highlight=False)


def _aligned(cells: list[str], widths: list[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
