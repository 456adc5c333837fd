# SPDX-License-Identifier: Apache-2.0
"""The thread that owns the rollout engine. It runs calls, polls the engine, and delivers events."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import torch

from whet.errors import EngineError, WhetError, describe
from whet.processes.background import Mailbox
from whet.rollout.protocol import Event, Partial, Request, RolloutEngine, Status

log = logging.getLogger(__name__)
POLL_SECONDS = 0.005  # a new request waits for this time at most, or for one decode step
IDLE_SECONDS = 1.0  # between two polls of an engine without requests, which may have died
T = TypeVar("T")
Deliver = Callable[[Event | WhetError], None]


class EngineStoppedError(EngineError):
    """Raised for all requests if the engine has failed, or the server is stopping."""


class EngineThread:
    """Runs an engine until `stop`. Other threads may call all methods but `run`. All but `stop` return at once.

    `on_death` is called with the error that ends the engine."""

    def __init__(self, engine: RolloutEngine, on_death: Callable[[WhetError], None]) -> None:
        self.engine = engine
        self._on_death = on_death
        # Runs a function in the thread that waits for events, usually of an event loop.
        self.run_elsewhere: Callable[[Callable[[], None]], object] = lambda function: function()
        self._calls = Mailbox()
        self.death: WhetError | None = None
        self._deliver: dict[str, Deliver] = {}  # by uid of an unfinished request
        self._waiting: deque[Request] = deque()  # the engine was full
        self._is_stopped = False
        self.status, self._seen_at = Status(version=0, running=0, waiting=0), time.monotonic()
        self._thread = threading.Thread(target=self.run, name="rollout-engine", daemon=True)
        self._thread.start()

    @property
    def busy_seconds(self) -> float:
        """Seconds since the last update of `status`. It is large while the engine loads weights or restarts."""
        return time.monotonic() - self._seen_at

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Calls the function in the engine's thread, between two polls."""

        def called() -> T:
            result = function()
            self._look()
            return result

        return self._calls.submit(called)

    def submit(self, requests: Sequence[Request], deliver: Deliver) -> None:
        """Submits the requests. `deliver` gets their events, or the error if the engine refuses a request."""

        def enter() -> None:
            for request in requests:
                self._deliver[request.uid] = deliver
                self._waiting.append(request)

        def tell(entered: Future[None]) -> None:
            """Delivers the error of an engine that failed before the requests reached it."""
            if (error := entered.exception()) is not None:
                self._tell([(deliver, _stopped(error))])

        self.call(enter).add_done_callback(tell)

    def abort(self, uids: Collection[str]) -> None:
        """Aborts the unfinished requests among `uids`. Their events are no longer delivered."""

        def leave() -> None:
            gone = {uid for uid in uids if self._deliver.pop(uid, None) is not None}
            self._waiting = deque(request for request in self._waiting if request.uid not in gone)
            if gone:
                self.engine.abort(gone)

        self.call(leave)

    def end_requests(self) -> None:
        """Ends all requests with an error."""

        def end() -> None:
            self.engine.abort(list(self._deliver))
            self._tell_all(_stopping())

        self.call(end)

    def stop(self) -> None:
        """Ends the thread and closes the engine."""

        def end() -> None:
            self._is_stopped = True

        self.call(end)
        self._thread.join()

    def run(self) -> None:
        """Runs calls and polls the engine, until `stop` or an error of the engine."""
        try:
            while not self._is_stopped:
                self._calls.serve(0.0 if self._deliver or self._is_stopped else IDLE_SECONDS)
                self._fill()
                events = self.engine.poll(POLL_SECONDS if self._deliver else 0.0)
                self._look()
                self._pass_on(events)
        except Exception as error:  # the engine must not be used any more, and the clients must know
            self._die(named(error))
        else:
            self.engine.close()
            self._die(_stopping(), is_expected=True)

    def _look(self) -> None:
        self.status, self._seen_at = self.engine.status(), time.monotonic()

    def _fill(self) -> None:
        """Submits waiting requests to the engine, in order, while it accepts them."""
        while self._waiting:
            request = self._waiting[0]
            try:
                if not self.engine.submit(request):
                    return
            except WhetError as error:
                self._tell([(self._deliver.pop(request.uid), error)])
            self._waiting.popleft()

    def _pass_on(self, events: Sequence[Event]) -> None:
        found = [(self._deliver.get(event.uid), event) for event in events]
        for event in events:
            if not isinstance(event, Partial):
                self._deliver.pop(event.uid, None)
        self._tell([(deliver, event) for deliver, event in found if deliver is not None])

    def _tell(self, found: Sequence[tuple[Deliver, Event | WhetError]]) -> None:
        """Delivers all events in one call: each switch of threads costs as much as a decode step of a small model."""

        def deliver_all() -> None:
            for deliver, event in found:
                deliver(event)

        if found:
            with suppress(RuntimeError):  # of an event loop that has ended, and so have its requests
                self.run_elsewhere(deliver_all)

    def _die(self, error: WhetError, *, is_expected: bool = False) -> None:
        """Delivers the error to all unfinished requests and calls, and to `on_death` unless it is expected."""
        self.death = error
        self._tell_all(error)
        self._calls.fail(error)
        if not is_expected:
            self._on_death(error)

    def _tell_all(self, error: WhetError) -> None:
        self._tell([(deliver, _stopped(error)) for deliver in self._deliver.values()])
        self._deliver.clear()
        self._waiting.clear()


def named(error: BaseException) -> WhetError:
    """Converts any error of an engine to a WhetError, whose message says how to act."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        cache = "its cache, for instance with --option kv_cache_bytes=268435456"
        change = f"lower --max-running, or {cache}, or sample in --dtype bfloat16"
        return EngineError("rollout engine", f"out of memory ({describe(error)})", change=change)
    if isinstance(error, WhetError):
        return error
    return EngineError("rollout engine", f"failed ({describe(error)})", change="read the server's log")


def _stopped(error: BaseException) -> EngineStoppedError:
    return EngineStoppedError.joined([error if isinstance(error, WhetError) else named(error)])


def _stopping() -> EngineError:
    return EngineError("server", "stopping", change="send the request again later")
