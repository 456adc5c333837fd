# SPDX-License-Identifier: Apache-2.0
"""Turns of a driver in a thread of their own, so that sampling goes on while models train."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from whet.errors import WorkerError
from whet.processes.background import Mailbox
from whet.rollout.collect import Driver, Turns

log = logging.getLogger(__name__)
TURN_SECONDS = 0.05  # longest wait of the thread, after which it sees new calls
SWITCH_SECONDS = 1e-4  # after which the loop and the thread take turns: with Python's 5e-3 either's short calls wait
CLOSE_SECONDS = 10.0
T = TypeVar("T")


class Background(Turns):
    """Makes turns all the time, from the first call on. What fails in the thread fails whoever waits."""

    blocks = False
    turn_seconds = TURN_SECONDS

    def __init__(self, driver: Driver, deadline_seconds: float) -> None:
        super().__init__(driver, deadline_seconds)
        self._calls = Mailbox()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._switch_seconds = sys.getswitchinterval()

    def promise(self) -> Future[Any]:
        """A future that the thread fulfils; it fails with the thread."""
        return self._calls.promise()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function in the thread, between two turns.  Returns the future of its result."""
        future = self._calls.submit(function)
        if self._thread is None and not future.done():
            sys.setswitchinterval(SWITCH_SECONDS)
            self._thread = threading.Thread(target=self._go, name="rollouts", daemon=True)
            self._thread.start()
        return future

    def pass_time(self, future: Future[Any], began: float | None = None) -> None:
        """Waits for the thread."""
        wait([future], TURN_SECONDS)

    def leave(self) -> None:
        """Lets the thread go on, after an error of a caller."""

    def close(self) -> None:
        """Ends the thread."""
        self._is_closing = True
        if self._thread is not None:
            sys.setswitchinterval(self._switch_seconds)
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                log.warning("the thread of the rollouts did not end within %g s", CLOSE_SECONDS)
        self._calls.fail(WorkerError("rollouts", "they are closed", change="build the run again"))

    def _go(self) -> None:
        """The thread: calls and turns of the driver, until it is closed."""
        never = Future[None]()
        try:
            while not self._is_closing:
                began = time.monotonic()
                self._calls.serve(TURN_SECONDS if self.driver.is_idle else 0.0)
                super().pass_time(never, began)
        except BaseException as error:
            self._calls.fail(error)
