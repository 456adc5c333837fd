# SPDX-License-Identifier: Apache-2.0
"""A reward process loads one score function, then scores items in order; an async function scores several at a time.

The first call carries source files; the reply is Started or a RewardError. Each later call carries items; the reply is
Scored."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from whet.errors import RewardError, WhetError, describe
from whet.processes.template import Caller, Serve, sendable, serve_tasks
from whet.processes.user_code import pin
from whet.registry import PARTS, REWARDS
from whet.rewards.adapter import RewardFunction, adapt, stand_ins
from whet.rewards.result import failure
from whet.types import Failure, Outcome, RewardItem

BLOCKED_SHARE = 0.1  # of the deadline: if a cancellation is later than this, another call blocked the event loop


@dataclass(frozen=True)
class ScorerSpec:
    """A score function, by name or as an object, and its options."""

    function: str | Callable[..., Any]
    kwargs: Mapping[str, object]
    correct_threshold: float
    timeout_seconds: float = 30.0  # for one item; used only if several items are scored at a time
    concurrency: int = 1
    manager: str | None = None  # "batch" requires a function of all responses, any other manager of one response
    tokenizer: tuple[str, bool] | None = None  # path and trust_remote_code of the tokenizer for a manager class

    def load(self) -> RewardFunction:
        """Loads the function; imports it if it is given by name.  Raises: RegistryError, RewardError, import errors."""
        with stand_ins():
            return self._load()

    def _load(self) -> RewardFunction:
        entry = REWARDS[self.function] if isinstance(self.function, str) else REWARDS.registered(self.function)
        if entry is None:
            function: Any = self.function
        else:
            entry.check(self.kwargs, "reward.kwargs.")
            function = entry.load()
            if "checked_by" in entry.marks:  # the mark names a function that checks options beyond type and range
                entry.marked("checked_by")(**self.kwargs)
        kwargs, runner = self.kwargs, None
        if inspect.isclass(function):
            (function, runner), kwargs = PARTS["reward_manager"].load()(function, self.kwargs, self.tokenizer), {}
        return adapt(
            function, kwargs=kwargs, correct_threshold=self.correct_threshold, manager=self.manager, runner=runner
        )


@dataclass(frozen=True)
class Started:
    """The reply of a worker that has loaded the function."""

    takes_batch: bool
    sources: Mapping[str, bytes]  # the user's files that were loaded, by path
    concurrency: int = 1  # number of calls that the worker serves at a time
    guard: int = 0  # process id of its guard: the ancestor of the worker and of all processes that it starts


@dataclass(frozen=True)
class Scored:
    """The outcomes of one call (or one Failure for all its items), and the time that the function took. `outcomes` is
    None if the call was late while another call blocked the process."""

    outcomes: list[Outcome] | Outcome | None
    seconds: float


def prepare(spec: bytes) -> Serve:
    """Returns the main function of the workers. It is called in the process from which workers are forked. This process
    must not have threads, so each worker loads the user's code itself."""
    _ = REWARDS.shipped, PARTS.shipped  # reads the source files once for all workers
    return partial(_serve, spec)


def _serve(spec_bytes: bytes, caller: Caller) -> None:
    number, content = caller.receive()
    sources: dict[str, bytes] = pickle.loads(content)
    pin(sources)
    try:
        spec: ScorerSpec = pickle.loads(spec_bytes)
        function = spec.load()
    except BaseException as error:  # the user's module runs here and may raise anything; the pool raises this error
        raised = RewardError("", traceback.format_exc().strip(), "code that can be imported")
        raised = sendable(RewardError, error) if isinstance(error, WhetError) else raised
        caller.send(number, pickle.dumps(raised))
        return
    concurrency = spec.concurrency if function.is_concurrent else 1
    caller.send(number, pickle.dumps(Started(function.takes_batch, sources, concurrency, os.getppid())))
    if concurrency > 1:
        _serve_concurrently(caller, function, spec.timeout_seconds)
        return
    while True:
        number, content = caller.receive()
        start = time.perf_counter()
        items = _items(content)
        outcomes = items if isinstance(items, Failure) else function.score(items)
        caller.send(number, pickle.dumps(Scored(outcomes, time.perf_counter() - start)))


def _items(content: bytes) -> list[RewardItem] | Failure:
    """Unpickles the items of a call; returns a Failure for all items if this process cannot unpickle an object."""
    try:
        items: list[RewardItem] = pickle.loads(content)
    except Exception as error:  # the pickle of a user's object may raise anything
        return failure(f"the item cannot be read in the reward process: {describe(error)}")
    return items


def _serve_concurrently(caller: Caller, function: RewardFunction, seconds: float) -> None:
    """Scores the item of each call in its own task within `seconds`, until the caller closes the connection."""

    async def reply(number: int, content: bytes) -> None:
        start = time.perf_counter()
        outcome = await _score_in_time(function, content, seconds)
        with suppress(ConnectionError):
            caller.send(number, pickle.dumps(Scored(outcome, time.perf_counter() - start)))

    try:
        function.run(serve_tasks(caller, reply))
    finally:
        function.close()


async def _score_in_time(function: RewardFunction, content: bytes, seconds: float) -> Outcome | None:
    """Scores one item, and cancels the call at its deadline. Returns None if the call is late but the event loop was
    blocked at the deadline, so that the call of another item may be the cause."""
    loop, items = asyncio.get_running_loop(), _items(content)
    if isinstance(items, Failure):
        return items
    deadline = loop.time() + seconds
    cancelled_at = loop.time()
    try:
        async with asyncio.timeout_at(deadline) as scope:
            try:
                outcome = await function.score_one(*items)
            except asyncio.CancelledError:
                cancelled_at = loop.time()
                raise
    except (TimeoutError, asyncio.CancelledError) as error:
        outcome = failure(describe(error))
    if not scope.expired():
        return outcome if loop.time() <= deadline else None
    if cancelled_at - deadline > BLOCKED_SHARE * seconds:
        return None
    return failure(f"timed out after {seconds:g} s", timed_out=True)
