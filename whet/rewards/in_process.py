# SPDX-License-Identifier: Apache-2.0
"""Scoring without processes of its own: in the caller, or in a thread where the function cannot travel to a process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from whet.errors import RewardError
from whet.rewards.adapter import RewardFunction, RewardItem, split_calls
from whet.rewards.result import Outcome, failure


class InlineScorer:
    """Scores in the calling thread, before `submit` returns, without a deadline."""

    def __init__(self, load: Callable[[], RewardFunction]) -> None:
        self._function = load()

    def submit(self, items: Sequence[RewardItem]) -> Future[list[Outcome]]:
        """The outcomes, one for each item, in order."""
        future: Future[list[Outcome]] = Future()
        future.set_result(self._function.score(items))
        return future

    def close(self) -> None:
        """Nothing to end."""


class ThreadScorer:
    """Scores in one thread. What is late is a Failure in time, but nothing can stop its thread: it is left behind, and
    a new one goes on. So a function that always stalls fills the process with threads, and one that holds the
    interpreter lock stops all of them.
    """

    def __init__(self, load: Callable[[], RewardFunction], timeout_seconds: float) -> None:
        self._load, self._timeout_seconds = load, timeout_seconds
        self._lane = _Lane(load())
        self._requests: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._run, name="whet-rewards", daemon=True).start()

    def submit(self, items: Sequence[RewardItem]) -> Future[list[Outcome]]:
        """The outcomes to come, one for each item, in order.  Raises: RewardError once closed."""
        call = _Call(items)
        with self._lock:
            if self._closed:
                raise RewardError("the reward pool is closed")
            self._requests.put(call)
        return call.future

    def close(self) -> None:
        """Lets the call that runs come to its end; outcomes still awaited behind it become a RewardError."""
        with self._lock:
            self._closed = True
            self._requests.put(None)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            if self._closed:
                request.future.set_exception(RewardError("the reward pool is closed"))
                continue
            calls = split_calls(request.items, takes_batch=self._lane.function.takes_batch)
            request.future.set_result([outcome for items in calls for outcome in self._score(items)])
        self._lane.calls.put(None)

    def _score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        deadline = self._timeout_seconds * len(items)
        call = _Call(items)
        self._lane.calls.put(call)
        try:
            return call.future.result(timeout=deadline)
        except TimeoutError:
            self._lane.calls.put(None)
            self._lane = _Lane(self._load())
            late = failure(f"timed out after {deadline:g} s (its thread cannot be stopped)", timed_out=True)
            return [late] * len(items)


class _Call:
    """Items, and the outcomes to come."""

    def __init__(self, items: Sequence[RewardItem]) -> None:
        self.items = items
        self.future: Future[list[Outcome]] = Future()
        self.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled


class _Lane:
    """One thread and the function that it calls, with an event loop of its own where that is async."""

    def __init__(self, function: RewardFunction) -> None:
        self.function = function
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="whet-reward-function", daemon=True).start()

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            call.future.set_result(self.function.score(call.items))
