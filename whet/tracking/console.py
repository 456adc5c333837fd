# SPDX-License-Identifier: Apache-2.0
"""The console: a tracker that prints a line with the main metrics for each step, and the progress of long phases.

On a terminal the lines have columns, and progress is a bar. Elsewhere (a log file, CI) each number has its name, and
progress is lines."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from whet.phases import phase, watching
from whet.processes.background import every
from whet.tracking.tracker import NO_TABLES, Tables

HEADER_EVERY = 20  # lines between two headers
STEP = "step"  # this phase is not shown; phases inside it are
LONG_SECONDS = 2.0  # a phase that takes longer gets a bar
REFRESH_SECONDS = 0.5


@dataclass(frozen=True)
class ConsoleColumn:
    """A column of the step lines. It shows the first of `metrics` that the step has; for a pattern, the `reduce` of all
    matches. It is hidden until its number differs from `unless`: a number, or another column's title."""

    title: str
    metrics: tuple[str, ...]
    form: str  # format specification
    unless: float | str | None = None
    reduce: Callable[[list[float]], float] = math.fsum
    width: int = 8  # least width on a terminal; 13 columns fit into 120 characters

    def number(self, metrics: Mapping[str, float]) -> float | None:
        """Returns the number that this column shows for a step's metrics; None if the step has none for it."""
        for pattern in self.metrics:
            if found := [value for name, value in metrics.items() if fnmatchcase(name, pattern)]:
                return self.reduce(found)
        return None


USE = (  # use of the machine; every trainer has these columns
    ConsoleColumn("tokens/s", ("perf/throughput",), ",.0f"),
    ConsoleColumn("MFU", ("perf/mfu",), ".1%", width=6),
    ConsoleColumn("GiB", ("system/*/memory_gib",), ".2f", width=7),  # resident memory of all processes
    ConsoleColumn("cores", ("system/*/cpu_cores",), ".1f", width=5),  # processor cores in use by all processes
    ConsoleColumn("GPU GiB", ("system/*/accelerator_gib",), ".2f", width=7),
    ConsoleColumn("GPU use", ("system/*/accelerator_use",), ".0%", reduce=fmean, width=7),  # mean over accelerators
)
COLUMNS = (
    ConsoleColumn("reward", ("filter/sampled_score", "critic/score/mean"), ".3f"),  # mean over all sampled trajectories
    ConsoleColumn("kept", ("critic/score/mean",), ".3f", unless="reward"),  # mean over those that a filter kept
    ConsoleColumn("accuracy", ("filter/sampled_accuracy", "reward/accuracy"), ".3f", unless="reward"),
    ConsoleColumn("stale", ("staleness/mean",), ".2f", width=5),  # versions between sampling and training
    ConsoleColumn("length", ("response_length/mean",), ".1f"),
    ConsoleColumn("KL", ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"), ".2e", unless=0.0),
    ConsoleColumn("grad norm", ("actor/grad_norm",), ".3f"),
    *USE,
)
NOTES = {  # explanations of names, printed when the name is first shown
    "kept": "the mean reward of the groups that algorithm.filter keeps to train on; reward is the mean of all groups",
    "reward_gap": "the reward in training, as a share of its range, minus the held-out accuracy; if the gap grows, the "
    "reward probably pays for something other than right responses",
}
VALIDATION = "val/"  # prefix of the metrics of a validation, which have a line of their own


class ConsoleTracker:
    """Prints a line for each step: the step, the columns that are not hidden, and the remaining time.

    The remaining time assumes the mean pace of this process, including the time between steps. It counts up to
    `likely_steps`, at which a run is expected to stop early; after that, up to `total_steps`."""

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        likely_steps: int | None = None,
        columns: tuple[ConsoleColumn, ...] = COLUMNS,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps, self._first_step, self._columns = total_steps, first_step, columns
        self._likely_steps = likely_steps or total_steps
        self._console = console or shared_console()
        self._clock, self._started = clock, clock()
        self._lines = 0
        self._shown: set[str] = set()  # titles of the columns that are no longer hidden
        self._notes = dict(NOTES)  # the notes that were not printed yet

    def log(self, step: int, metrics: Mapping[str, float], tables: Tables = NO_TABLES) -> None:
        """Prints the line of a step, and a line for its validation, if any. Ignores tables."""
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
    """Returns the metrics of a validation to show. Leaves out `failures` if it is 0, a reward that equals the accuracy,
    and metrics by data source if there is only one source."""
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
    """Formats a duration as h:mm:ss, or as m:ss below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


@cache
def shared_console() -> Console:
    """Returns the console of this process. Lines and progress bars must share it, or they overwrite each other."""
    return Console(highlight=False)


def _aligned(cells: list[str], widths: list[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


LINE_SECONDS, LINE_SECONDS_IN_STEPS = 10.0, 60.0  # without a terminal: time until a phase's first line is printed


@dataclass
class _Phase:
    name: str
    started: float
    next_line: float
    counted_since: float = 0.0
    done: int = 0
    total: int | None = None
    note: str = ""


@contextmanager
def long_phase(name: str) -> Iterator[None]:
    """Shows the block (the work of a command) as a phase `name` if it takes long: on the terminal, else on stderr."""
    console = shared_console()
    shown = LongPhases(console if console.is_terminal else Console(stderr=True, highlight=False))
    with shown.watch(), phase(name):
        yield


class LongPhases:
    """Shows the current phase of a run if it takes long: on a terminal as a progress bar, elsewhere as lines, each
    after twice the time of the line before.
    The counts from `phases.counted` are shown with the phase, and without a terminal also at its end."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console or shared_console(), clock
        self._open: list[_Phase] = []
        self._bar: Progress | None = None
        self._lock = threading.Lock()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Shows the phases of this thread while the block runs."""
        with every(REFRESH_SECONDS, self.refresh), watching(self.phase, self.count):
            yield

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Makes `name` the current phase during the block."""
        started = self._clock()
        with self._lock:
            wait = LINE_SECONDS_IN_STEPS if self._is_step else LINE_SECONDS
            opened = _Phase(name.removeprefix("time/"), started, started + wait, started)
            self._open.append(opened)
        try:
            yield
        finally:
            with self._lock:
                self._end(opened)

    def count(self, done: int, total: int, note: str) -> None:
        """Sets the progress of the innermost phase, unless it is a step. A smaller `done` begins a new round."""
        if self._open and self._open[-1].name != STEP:
            phase = self._open[-1]
            if done < phase.done:
                phase.counted_since = self._clock()
            phase.done, phase.total, phase.note = done, total, note

    def refresh(self) -> None:
        """Updates the bar, or prints the next line."""
        with self._lock:
            phases = [phase for phase in self._open if phase.name != STEP]
            if not phases:
                return
            now, outer = self._clock(), phases[0]
            seconds = now - outer.started
            counted = [number for number, phase in enumerate(phases) if phase.total]
            phases = phases[: 1 + counted[0]] if counted else phases
            if self._console.is_terminal and seconds >= LONG_SECONDS:
                self._draw(phases, seconds)
            elif not self._console.is_terminal and now >= outer.next_line:
                outer.next_line = now + seconds
                self._print(phases, seconds)

    def _draw(self, phases: list[_Phase], seconds: float) -> None:
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
            self._bar = Progress(*columns, console=self._console, transient=True, refresh_per_second=2)
            self._bar.add_task("", total=None, state="")
        [task], last = self._bar.task_ids, phases[-1]
        name, state = self._name(phases), self._state(phases, seconds)
        self._bar.update(task, description=name, completed=last.done, total=last.total, state=state)
        self._bar.start()

    def _end(self, phase: _Phase) -> None:
        self._open.remove(phase)
        if self._bar is not None and all(each.name == STEP for each in self._open):
            self._bar.stop()
            self._bar = None
        seconds = self._clock() - phase.started
        if not self._console.is_terminal and not self._is_step and phase.total and seconds >= LONG_SECONDS:
            self._print([*self._open, phase], seconds)

    @property
    def _is_step(self) -> bool:
        return any(phase.name == STEP for phase in self._open)

    def _print(self, phases: list[_Phase], seconds: float) -> None:
        line = f"{self._name(phases)}: {self._state(phases, seconds)}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    @staticmethod
    def _name(phases: list[_Phase]) -> str:
        return ", ".join(phase.name for phase in phases if phase.name != STEP)

    def _state(self, phases: list[_Phase], seconds: float) -> str:
        """Formats the progress of the last phase, the time so far, and the remaining time at this pace."""
        last = phases[-1]
        parts = [clock_time(seconds)]
        if last.total:
            parts = [f"{last.done}/{last.total}", *parts]
        if last.total and 0 < last.done < last.total:
            counted = self._clock() - last.counted_since
            parts.append(f"about {clock_time(counted / last.done * (last.total - last.done))} left")
        return ", ".join([*parts, *([last.note] if last.note else [])])
