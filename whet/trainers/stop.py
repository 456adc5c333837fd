# SPDX-License-Identifier: Apache-2.0
"""Ways to end a run early in good order: Ctrl-C, SIGTERM (a spot instance that is taken back, a scheduler's limit),
SIGUSR1, or a file named `stop` in the run's folder.

The run ends at the next place where its state is that of a whole step, saves, and says how to go on. A second signal
ends it at once.
"""

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

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(KeyboardInterrupt):
    """The run was asked to end. `number` is the signal's, None for the file. No `except Exception` swallows it."""

    def __init__(self, reason: str, number: int | None) -> None:
        super().__init__(reason)
        self.number = number


@dataclass(frozen=True)
class EarlyStop:
    """A callback that makes the step just done the last one where the run is good enough."""

    likely_steps: int | None  # at which that is expected; None: unknown
    is_enough: Callable[[Any], bool]  # of a run

    def __call__(self, run: Any, *_: object) -> None:
        """Stops the run where it is good enough."""
        if self.is_enough(run):
            run.stop()


def likely_steps(callbacks: Iterable[object], total_steps: int) -> int | None:
    """The step at which a run with these callbacks is expected to end; None for a run that does not end early."""
    ends = (each.likely_steps or total_steps for each in callbacks if isinstance(each, EarlyStop))
    return min(ends, default=None)


class StopSignals:
    """Takes the signals while it is entered.

    `here` raises Stopped where one has come; inside `at_once` it is raised wherever the run then is.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self._asked: Stopped | None = None
        self._at_once = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other may take signals
            self.file.unlink(missing_ok=True)
            self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def here(self) -> None:
        """Raises: Stopped if the run was asked to end."""
        if self._asked is None and self.file.exists():
            self._asked = Stopped(f"the file {self.file}", None)
        if self._asked is not None:
            raise self._asked

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Marks a block that may be left anywhere, because nothing that is saved changes in it."""
        self.here()
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            raise KeyboardInterrupt("asked twice: ended at once, without saving")
        self._asked = Stopped("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name, number)
        if self._at_once:
            raise self._asked
        # No logging: the handler may stand in the middle of a line of the console.
        os.write(2, f"{self._asked}: the run ends after this step; again: at once, without saving\n".encode())
