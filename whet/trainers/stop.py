# SPDX-License-Identifier: Apache-2.0
"""Ways to end a run early and keep its steps: Ctrl-C, SIGTERM (a spot instance that is taken back, a scheduler's
limit), SIGUSR1, or a file named `stop` in the run's folder.

The run ends at the next point between whole steps, saves, and prints how to resume. A second signal ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Self

from whet.phases import MOVING

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(KeyboardInterrupt):
    """Ends the run. `number` is the signal's number, None for the file `stop`. `except Exception` does not catch it."""

    def __init__(self, reason: str, number: int | None) -> None:
        super().__init__(reason)
        self.number = number


@dataclass(frozen=True)
class EarlyStop:
    """A callback that ends the run after the step at which `is_enough(run)` is true."""

    likely_steps: int | None  # expected last step; None: unknown
    is_enough: Callable[[Any], bool]  # of a run

    def __call__(self, run: Any, *_: object) -> None:
        """Ends the run if `is_enough(run)` is true."""
        if self.is_enough(run):
            run.stop()


def likely_steps(callbacks: Iterable[object], total_steps: int) -> int | None:
    """Returns the step at which these callbacks are expected to end the run; None if they do not end it early."""
    ends = (each.likely_steps or total_steps for each in callbacks if isinstance(each, EarlyStop))
    return min(ends, default=None)


class StopSignals:
    """Catches the signals inside a `with` block.

    `here` raises Stopped if a signal has come. Inside `at_once` a signal raises it at any line."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.asked: Stopped | None = None  # the request to end the run
        self._at_once = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # only the main thread may set signal handlers
            self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def here(self) -> None:
        """Raises: Stopped if the run was asked to end."""
        if self.asked is None and self.file.exists():
            self.asked = Stopped(f"the file {self.file}", None)
        if self.asked is not None:
            raise self.asked

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Marks a block that changes no saved state. A signal may end it at any line, but not while models move."""
        self.here()
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            raise KeyboardInterrupt("asked twice: ended at once, without saving")
        self.asked = Stopped("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name, number)
        if self._at_once and not MOVING.locked():
            raise self.asked
        # No logging: the signal may come in the middle of a line of the console.
        os.write(2, f"{self.asked}: the run ends after this step; again: at once, without saving\n".encode())
