# SPDX-License-Identifier: Apache-2.0
"""A cache with a bound in bytes, for pixel values and for the features of a vision tower."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """Values by key; the least recently used ones go when more than `limit_bytes` are held. Safe for threads.

    `hits` and `misses` count the calls of `get` that found a value, finished or on its way, and those that made it.
    """

    def __init__(self, limit_bytes: int, size: Callable[[Value], int], num_threads: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.hits = self.misses = self.held_bytes = 0
        self._size, self._num_threads = size, num_threads
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._coming: dict[Hashable, Future[Value]] = {}
        self._lock = Lock()
        self._threads: ThreadPoolExecutor | None = None

    def find(self, key: Hashable) -> Value | None:
        """The value of `key`, or None where it is not held."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
            return None

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of `key`, which `make` gives where it is neither held nor on its way.  Raises: what `make` does."""
        with self._lock:
            coming = self._coming.get(key)
            found = key in self._values
            self.hits, self.misses = self.hits + (found or coming is not None), self.misses + (not found and not coming)
            if found:
                self._values.move_to_end(key)
                return self._values[key]
        return coming.result() if coming is not None else self.put(key, make())

    def put(self, key: Hashable, value: Value) -> Value:
        """Holds a value, unless it is larger than the limit.  Returns it."""
        size = self._size(value)
        with self._lock:
            if key not in self._values and size <= self.limit_bytes:
                self._values[key] = value
                self.held_bytes += size
                while self.held_bytes > self.limit_bytes:
                    self.held_bytes -= self._size(self._values.popitem(last=False)[1])
        return value

    def prefetch(self, jobs: Iterable[tuple[Hashable, Callable[[], Value]]]) -> None:
        """Makes values in threads, ahead of `get`. An error is raised by the `get` that meets it, or is met again."""
        with self._lock:
            for key, make in jobs:
                if key in self._values or key in self._coming:
                    continue
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="whet-media")
                self._coming[key] = self._threads.submit(self._make, key, make)

    def clear(self) -> None:
        """Forgets all values."""
        with self._lock:
            self._values.clear()
            self.held_bytes = 0

    def _make(self, key: Hashable, make: Callable[[], Value]) -> Value:
        try:
            return self.put(key, make())
        finally:
            with self._lock:
                self._coming.pop(key, None)
