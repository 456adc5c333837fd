# SPDX-License-Identifier: Apache-2.0
"""Scoring in this process: in the calling thread, or in a thread for a function that cannot be pickled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial

from whet.errors import RewardError
from whet.processes.background import Background
from whet.rewards.adapter import RewardFunction, split_calls
from whet.rewards.result import CLOSED, failure
from whet.types import Outcome, RewardItem


class InlineScorer:
    """Scores in the calling thread, before `submit` returns, without a deadline."""

    def __init__(self, load: Callable[[], RewardFunction]) -> None:
        self._function = load()

    def submit(self, items: Sequence[RewardItem]) -> Future[list[Outcome]]:
        """Returns a finished future with the outcome of each item, in order."""
        future: Future[list[Outcome]] = Future()
        future.set_result(self._function.score(items))
        return future

    def close(self) -> None:
        """Does nothing: there are no processes."""


class ThreadScorer:
    """Scores in one thread. A late call becomes a Failure at its deadline, but its thread cannot be stopped: it is
    abandoned and a new one takes over. A function that always hangs thus fills the process with threads, and one that
    holds the interpreter lock blocks all of them.
    """

    def __init__(self, load: Callable[[], RewardFunction], timeout_seconds: float) -> None:
        self._load, self._timeout_seconds = load, timeout_seconds
        self._function, self._thread = load(), Background("whet-reward-function")
        self._requests = Background("whet-rewards")
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, items: Sequence[RewardItem]) -> Future[list[Outcome]]:
        """Returns a future with the outcome of each item, in order.  Raises: RewardError once closed."""
        with self._lock:
            if self._closed:
                raise RewardError(CLOSED)
            return self._requests.submit(partial(self._score, items))

    def close(self) -> None:
        """Lets the running call finish; calls that wait after it raise RewardError."""
        with self._lock:
            self._closed = True
            self._requests.submit(lambda: self._thread.close())
            self._requests.close()

    def _score(self, items: Sequence[RewardItem]) -> list[Outcome]:
        calls = split_calls(items, takes_batch=self._function.takes_batch)
        return [outcome for call in calls for outcome in self._score_call(call)]

    def _score_call(self, items: Sequence[RewardItem]) -> list[Outcome]:
        if self._closed:
            raise RewardError(CLOSED)
        deadline = self._timeout_seconds * len(items)
        future = self._thread.submit(partial(self._function.score, items))
        if wait([future], deadline).done:
            return future.result()
        self._thread.close()
        self._function, self._thread = self._load(), Background("whet-reward-function")
        late = failure(f"timed out after {deadline:g} s (its thread cannot be stopped)", timed_out=True)
        return [late] * len(items)
