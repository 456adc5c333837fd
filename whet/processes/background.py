# SPDX-License-Identifier: Apache-2.0
"""Calls in daemon threads: for other people's code that may hang. No wait for one is longer than its caller wants, and
the program ends without them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from whet.errors import DeadlineError

T = TypeVar("T")


class Background:
    """Threads that make the calls that they are given, in order."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = threads
        for _ in range(threads):
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """The result of a call, to come. It can be cancelled until it has begun. SystemExit becomes a RuntimeError."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Lets the threads end after the calls that they were given."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _work(self) -> None:
        while (given := self._calls.get()) is not None:
            future, call = given
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # libraries exit, too
                    future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def within(seconds: float, call: Callable[[], T], late: str) -> T:
    """Returns what a call returns. Its thread is left behind when it is late.  Raises: DeadlineError, as `late` says;
    what the call raises."""
    thread = Background("whet-within")
    future = thread.submit(call)
    thread.close()
    if not wait([future], seconds).done:
        raise DeadlineError(late)
    return future.result()


@contextmanager
def every(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Makes a call again and again, in a thread, while the block runs."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(seconds):
            call()

    thread = threading.Thread(target=repeat, daemon=True, name="whet-every")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
