# SPDX-License-Identifier: Apache-2.0
"""Calls in daemon threads, for other people's code that may hang: the caller bounds its wait, and the program can end
while they still run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from whet.errors import DeadlineError

T = TypeVar("T")


class Background:
    """Daemon threads that run submitted calls in order."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = threads
        for _ in range(threads):
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Returns a future of the call's result. It can be cancelled before the call begins. SystemExit becomes a
        RuntimeError."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Ends the threads after the calls submitted so far."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _work(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, call = entry
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # a library may call sys.exit
                    future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def in_new_loop(ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Returns the result of a coroutine, which runs in a thread of its own: this one may have an event loop already."""
    import asyncio

    thread = Background("whet-loop")
    future = thread.submit(lambda: asyncio.run(ask()))
    thread.close()
    return future.result()


def within(seconds: float, call: Callable[[], T], late: DeadlineError) -> T:
    """Returns the result of a call; after `seconds` its thread is abandoned.  Raises: `late`; any error of the call."""
    thread = Background("whet-within")
    future = thread.submit(call)
    thread.close()
    if not wait([future], seconds).done:
        raise late
    return future.result()


@contextmanager
def every(seconds: float, call: Callable[[], None]) -> Iterator[None]:
    """Repeats a call in a thread, with `seconds` between two calls, while the block runs."""
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
