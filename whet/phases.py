# SPDX-License-Identifier: Apache-2.0
"""Announces the phases of a run or a command, and their progress, to the watchers of a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TypeVar

T = TypeVar("T")
Watch = Callable[[str], AbstractContextManager[None]]
Counter = Callable[[int, int, str], None]
_watchers: dict[int, list[tuple[Watch, Counter]]] = {}  # by thread id
_profilers: list[Watch] = []  # they watch all threads
NOBODY = nullcontext()
MOVING = threading.Lock()  # held while models move to the device or off it, which a signal must not end halfway


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Announces the block as a phase of the run to the watchers of this thread, and to profilers; records nothing."""
    with ExitStack() as watched:
        for watch, _ in _watchers.get(threading.get_ident(), ()):
            watched.enter_context(watch(name))
        watched.enter_context(span(name))
        yield


def span(name: str) -> AbstractContextManager[None]:
    """Announces the block, a part of a phase, to profilers only, in any process. Costs nothing without a profiler."""
    return _profiled(name) if _profilers else NOBODY


@contextmanager
def _profiled(name: str) -> Iterator[None]:
    with ExitStack() as profiled:
        for watch in list(_profilers):
            profiled.enter_context(watch(name))
        yield


@contextmanager
def profiling(watch: Watch) -> Iterator[None]:
    """Opens `watch(name)` around every phase and span of this process during this block."""
    _profilers.append(watch)
    try:
        yield
    finally:
        _profilers.remove(watch)


def counted(done: int, total: int, note: str = "") -> None:
    """Announces the progress of the current phase to the watchers of this thread."""
    for _, counter in _watchers.get(threading.get_ident(), ()):
        counter(done, total, note)


@contextmanager
def watching(watch: Watch, counter: Counter = lambda done, total, note: None) -> Iterator[None]:
    """Opens `watch(name)` around every phase in this thread (also the blocks of `Metrics.time`) during this block, so
    that the training loop needs no code to show phases. `counter` gets the arguments of `counted`."""
    watchers, own = _watchers.setdefault(threading.get_ident(), []), (watch, counter)
    watchers.append(own)
    try:
        yield
    finally:
        watchers.remove(own)


def counting(items: Iterable[T]) -> Iterator[T]:
    """Yields the items, and after each item announces how many are done."""
    given = list(items)
    for done, item in enumerate(given, 1):
        yield item
        counted(done, len(given))
