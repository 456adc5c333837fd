# SPDX-License-Identifier: Apache-2.0
"""Runs calls in daemon threads, for other people's code that may hang. The caller's wait has a limit, and the program
can end while calls still run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from whet.errors import DeadlineError

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class Mailbox:
    """A queue of calls: any thread submits them, and the owner's thread runs them."""

    def __init__(self) -> None:
        self.error: BaseException | None = None  # the argument of `fail`
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._promises: set[Future[Any]] = set()

    def promise(self) -> Future[Any]:
        """Returns a future whose result the owner sets. After `fail` it raises an error."""
        future: Future[Any] = Future()
        self._promises.add(future)
        future.add_done_callback(self._promises.discard)
        if self.error is not None:
            _fail(future, self.error)
        return future

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Returns a future of the call's result. The future can be cancelled before the call begins. SystemExit becomes
        a RuntimeError."""
        future = self.promise()
        self._calls.put((future, call))
        return future

    def serve(self, seconds: float) -> None:
        """Runs the waiting calls in order. If there is none, waits up to `seconds` for the first."""
        while self.take(seconds):
            seconds = 0.0

    def take(self, seconds: float | None = None) -> bool:
        """Runs the next call.  Returns False after `close`, and if no call comes within `seconds`."""
        with suppress(Empty):
            if (entry := self._calls.get(timeout=seconds)) is None:
                return False
            future, call = entry
            if not future.done() and future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # a library may call sys.exit
                    future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            return True
        return False

    def close(self) -> None:
        """Ends one serving thread, after the calls submitted so far."""
        self._calls.put(None)

    def fail(self, error: BaseException) -> None:
        """Makes all promises, present and later, raise the error of the first call of `fail`."""
        self.error = self.error or error
        for future in list(self._promises):
            _fail(future, self.error)


def _fail(future: Future[Any], error: BaseException) -> None:
    with suppress(InvalidStateError):  # another thread was faster
        future.set_exception(error)


class Background(Mailbox):
    """Daemon threads that run submitted calls in order."""

    def __init__(self, name: str, threads: int = 1) -> None:
        super().__init__()
        self._threads = threads
        for _ in range(threads):
            threading.Thread(target=self._work, name=name, daemon=True).start()

    def close(self) -> None:
        """Ends the threads after the calls submitted so far."""
        for _ in range(self._threads):
            super().close()

    def _work(self) -> None:
        while self.take():
            pass


_loops: dict[str, asyncio.AbstractEventLoop] = {}  # the loop of `in_loop`, once it has started
os.register_at_fork(after_in_child=_loops.clear)  # a forked child has no thread that runs the loop


def in_loop(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Runs a coroutine in an event loop that has its own thread until this process ends, because the calling thread may
    already run an event loop. Cancelling the future cancels the coroutine."""
    import asyncio

    if (loop := _loops.get("")) is None:
        loop = _loops.setdefault("", new := asyncio.new_event_loop())  # another thread may be faster
        if loop is new:
            threading.Thread(target=loop.run_forever, name="whet-loop", daemon=True).start()
        else:
            new.close()
    return asyncio.run_coroutine_threadsafe(work, loop)


def within(seconds: float, call: Callable[[], T], late: DeadlineError) -> T:
    """Returns the result of a call in a thread.  Raises: its errors; `late` after `seconds` (the thread runs on)."""
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
