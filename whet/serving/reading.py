# SPDX-License-Identifier: Apache-2.0
"""Threads in which prompts are rendered and encoded, beside the event loop."""

from __future__ import annotations

import asyncio
import heapq
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TypeVar

T = TypeVar("T")
THREADS = max(2, min(8, os.cpu_count() or 1))
LONG_BYTES = 2**16  # a body over this may take seconds; such ones leave one thread to the others


class ShortestFirst:
    """Runs functions in threads, those of the shortest bodies first, so that a long text holds up no short one."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads, self._pool = threads, ThreadPoolExecutor(threads, "prompts")
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap by size and order
        self._order, self._running, self._long = count(), 0, 0

    async def run(self, size: int, function: Callable[[], T]) -> T:
        """The result of the function for a body of `size` bytes, once it is its turn."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        heapq.heappush(self._waiting, (size, next(self._order), turn))
        self._start()
        try:
            await turn
            return await loop.run_in_executor(self._pool, function)
        finally:
            if not turn.cancelled():
                self._running -= 1
                self._long -= size > LONG_BYTES
            self._start()

    def _start(self) -> None:
        while self._waiting and self._running < self._threads:
            size, _, turn = self._waiting[0]
            if size > LONG_BYTES and self._long == self._threads - 1:
                return
            heapq.heappop(self._waiting)
            if not turn.cancelled():
                self._running += 1
                self._long += size > LONG_BYTES
                turn.set_result(None)
