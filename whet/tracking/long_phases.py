# SPDX-License-Identifier: Apache-2.0
"""Progress of phases that take long: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from whet.phases import phase, watching
from whet.processes.background import every
from whet.tracking.console import clock_time, shared_console

STEP = "step"  # this phase is not shown, but those inside it are
LONG_SECONDS = 2.0  # until a bar is drawn
LINE_SECONDS, LINE_SECONDS_IN_STEPS = 10.0, 60.0  # until the first line is printed without a terminal
REFRESH_SECONDS = 0.5


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
    """Shows the block, the work of a whole command, as a phase once it takes long: on a terminal, else on stderr."""
    console = shared_console()
    shown = LongPhases(console if console.is_terminal else Console(stderr=True, highlight=False))
    with shown.watch(), phase(name):
        yield


class LongPhases:
    """Shows the current phase of a run once it takes long: a progress bar on a terminal, elsewhere lines, each after
    twice the time of the line before.

    The counts from `phases.counted` are shown with the phase, and without a terminal also at its end.
    """

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
        """Opens a phase for the duration of the block."""
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
        """Sets the progress of the innermost phase, unless that is a step. A smaller number begins another round."""
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
        """The progress of the last phase, the time so far, and the remaining time at this pace."""
        last = phases[-1]
        parts = [clock_time(seconds)]
        if last.total:
            parts = [f"{last.done}/{last.total}", *parts]
        if last.total and 0 < last.done < last.total:
            counted = self._clock() - last.counted_since
            parts.append(f"about {clock_time(counted / last.done * (last.total - last.done))} left")
        return ", ".join([*parts, *([last.note] if last.note else [])])
