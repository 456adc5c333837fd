# SPDX-License-Identifier: Apache-2.0
"""A reward process of an async function: each call is a task of its own, cancelled at its deadline."""

from __future__ import annotations

import asyncio
import pickle
import time
from contextlib import suppress

from whet.errors import describe
from whet.processes.template import Caller, serve_tasks
from whet.rewards.adapter import RewardFunction
from whet.rewards.result import failure
from whet.rewards.worker import Scored, unreadable
from whet.types import Outcome

BLOCKED_SHARE = 0.1  # of the deadline: a later cancellation means that another call held the event loop


def serve_concurrently(caller: Caller, function: RewardFunction, seconds: float) -> None:
    """Scores the item of each call, each within `seconds`, until the caller closes the connection."""

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
    """Scores one item and cancels it at its deadline. None: it is late, but the event loop was blocked at the deadline,
    so the delay may be that of another item."""
    loop = asyncio.get_running_loop()
    try:
        (item,) = pickle.loads(content)
    except Exception as error:  # an object whose class this process cannot import
        return unreadable(error)
    deadline = loop.time() + seconds
    cancelled_at = loop.time()
    try:
        async with asyncio.timeout_at(deadline) as scope:
            try:
                outcome = await function.score_one(item)
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
