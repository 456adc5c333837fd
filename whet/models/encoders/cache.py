# SPDX-License-Identifier: Apache-2.0
"""A cache with a bound in bytes, for prepared media and for the features of a tower."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import takewhile
from math import inf
from threading import Lock
from time import perf_counter
from typing import Generic, TypeVar

Value = TypeVar("Value")


class BoundedCache(Generic[Value]):
    """Values by key; the least recently used ones go when more than `limit_bytes` are held. Safe for threads.

    Values that are made ahead stay until they are read: as many as fill half of it, the next ones as these are read.
    `hits` and `misses` count the calls of `get` that found a value, finished or on its way, and those that made it;
    `waited_seconds` is the time in which they made it or waited for it.
    """

    def __init__(self, limit_bytes: int, size: Callable[[Value], int], num_threads: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.hits = self.misses = self.held_bytes = 0
        self.waited_seconds = 0.0
        self._size, self._num_threads = size, num_threads
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._waiting: OrderedDict[Hashable, Callable[[], Value]] = OrderedDict()  # to be made ahead, in order
        self._coming: dict[Hashable, Future[Value]] = {}
        self._ahead: dict[Hashable, int] = {}  # sizes of values that wait for their reader
        self._reads: Counter[Hashable] = Counter()  # that are still announced
        self._largest_bytes = inf  # of those that were made ahead
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
        start = perf_counter()
        try:
            return self._get(key, make)
        finally:
            with self._lock:
                self.waited_seconds += perf_counter() - start

    def _get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        with self._lock:
            coming, found = self._coming.get(key), self._values.get(key)
            is_missing = found is None and coming is None
            self.hits, self.misses = self.hits + (not is_missing), self.misses + is_missing
            if is_missing and key in self._waiting:  # the reader passed over what comes before it in the order
                for each in [*self._ahead, *takewhile(lambda each: each != key, self._waiting)]:
                    self._ahead.pop(each, None)
                    self._waiting.pop(each, None)
                    del self._reads[each]
            self._waiting.pop(key, None)
            if found is not None:
                self._values.move_to_end(key)
            if coming is None:
                self._read(key)
        if coming is None:
            return self.put(key, make()) if found is None else found
        value = coming.result()
        with self._lock:
            self._read(key)
        return value

    def in_order(self, keys: Iterable[Hashable]) -> list[Hashable]:
        """The keys in the order in which `prefetch` was asked for them."""
        with self._lock:
            place = {key: place for place, key in enumerate((*self._ahead, *self._coming, *self._waiting))}
        return sorted(keys, key=lambda key: place.get(key, -1))

    def put(self, key: Hashable, value: Value) -> Value:
        """Holds a value, unless it is larger than the limit.  Returns it."""
        with self._lock:
            if self._size(value) <= self.limit_bytes:
                self._hold(key, value)
        return value

    def prefetch(self, jobs: Iterable[tuple[Hashable, Callable[[], Value]]]) -> None:
        """Makes values in threads, ahead of `get`, in the order in which it will ask for them; a key is there as often
        as it will be asked for. An error is raised by the `get` that meets it, or is met again."""
        times: Counter[Hashable] = Counter()
        with self._lock:
            for key, make in jobs:
                times[key] += 1
                if key not in self._coming and key not in self._ahead:
                    self._waiting.setdefault(key, make)
            for key, number in times.items():
                self._reads[key] = max(self._reads[key], number)
            self._top_up()

    def clear(self) -> None:
        """Forgets all values."""
        with self._lock:
            self._values.clear()
            self._ahead.clear()
            self.held_bytes = 0

    def _make(self, key: Hashable, make: Callable[[], Value]) -> Value:
        try:
            value = make()
            with self._lock:
                self._ahead[key] = size = self._size(value)
                self._largest_bytes = size if self._largest_bytes == inf else max(self._largest_bytes, size)
                self._hold(key, value)
            return value
        finally:
            with self._lock:
                self._coming.pop(key, None)
                self._top_up()

    def _top_up(self) -> None:
        """Begins as many of the waiting values as there is room for."""
        while self._waiting and (
            not (self._coming or self._ahead)
            or 2 * (sum(self._ahead.values()) + self._largest_bytes * (len(self._coming) + 1)) <= self.limit_bytes
        ):
            key, make = self._waiting.popitem(last=False)
            if key in self._values:
                self._ahead[key] = self._size(self._values[key])
                continue
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="whet-media")
            self._coming[key] = self._threads.submit(self._make, key, make)

    def _read(self, key: Hashable) -> None:
        self._reads[key] -= 1
        if self._reads[key] <= 0:
            del self._reads[key]
            self._ahead.pop(key, None)
        self._trim()
        self._top_up()

    def _hold(self, key: Hashable, value: Value) -> None:
        """Holds a value, and lets others go that were used least recently, but none that waits for its reader."""
        if key not in self._values:
            self._values[key] = value
            self.held_bytes += self._size(value)
        self._trim()

    def _trim(self) -> None:
        gone, over = [], self.held_bytes - self.limit_bytes
        for key, value in self._values.items():
            if over <= 0:
                break
            if key not in self._ahead:
                gone.append(key)
                over -= self._size(value)
        for key in gone:
            self.held_bytes -= self._size(self._values.pop(key))
