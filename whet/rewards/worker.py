# SPDX-License-Identifier: Apache-2.0
"""A reward process: loads one score function, then answers each task that it is given, in order.

pool -> worker   source files, once; then lists of tasks (number, pickled items, how many they are)
worker -> pool   Started or StartFailed, once; then one Answer a task, under its number
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from whet.errors import WhetError, describe
from whet.processes.template import Caller, Serve
from whet.processes.user_code import pin
from whet.registry import REWARDS
from whet.rewards.adapter import RewardFunction, adapt
from whet.rewards.result import Outcome, failure


@dataclass(frozen=True)
class WorkerSpec:
    """A score function, by reference or itself, with its options."""

    function: str | Callable[..., Any]
    kwargs: Mapping[str, Any]
    correct_threshold: float

    def load(self) -> RewardFunction:
        """The function, imported where it is named.  Raises: RegistryError, RewardError, what the import raises."""
        function = self.function
        if isinstance(function, str):
            REWARDS[function].check(self.kwargs, "reward.kwargs.")
            function = REWARDS[function].load()
        return adapt(function, kwargs=self.kwargs, correct_threshold=self.correct_threshold)


@dataclass(frozen=True)
class Started:
    """The function is loaded, and the worker waits for tasks."""

    takes_batch: bool
    sources: Mapping[str, bytes]  # the user's files that were loaded, by path


@dataclass(frozen=True)
class StartFailed:
    """Why the function cannot be loaded: what whet says of it, else the traceback."""

    why: str


@dataclass(frozen=True)
class Answer:
    """The outcomes of one task, and how long the function took."""

    outcomes: list[Outcome]
    seconds: float


def prepare(spec: bytes) -> Serve:
    """Returns the main function of each worker, which loads the user's code: the template must have no threads."""
    return partial(_serve, spec)


def _serve(spec_bytes: bytes, caller: Caller) -> None:
    sources: dict[str, bytes] = pickle.loads(caller.receive()[1])
    pin(sources)
    try:
        spec: WorkerSpec = pickle.loads(spec_bytes)
        function = spec.load()
    except BaseException as error:  # the user's module runs here; the pool raises what it says
        why = str(error) if isinstance(error, WhetError) else traceback.format_exc()
        caller.send(0, pickle.dumps(StartFailed(why)))
        return
    caller.send(0, pickle.dumps(Started(function.takes_batch, sources)))
    while True:
        tasks: list[tuple[int, bytes, int]] = pickle.loads(caller.receive()[1])
        for number, payload, count in tasks:
            start = time.perf_counter()
            outcomes = _outcomes(function, payload, count)
            caller.send(number, pickle.dumps(Answer(outcomes, time.perf_counter() - start)))


def _outcomes(function: RewardFunction, payload: bytes, count: int) -> list[Outcome]:
    try:
        items = pickle.loads(payload)
    except Exception as error:  # an object whose class this process cannot import
        return [failure(f"the item cannot be read in the reward process: {describe(error)}")] * count
    return function.score(items)
