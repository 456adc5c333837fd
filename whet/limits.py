# SPDX-License-Identifier: Apache-2.0
"""Limits on what input may cost that others wrote: a template that never ends, a document that unfolds forever."""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

SECONDS = 10.0
NUM_BYTES = 2**30
_AGAIN_SECONDS = 1.0  # between two alarms, where something swallowed the first
_inside: list[float] = []  # the limit of the block that the main thread is in


@contextmanager
def bounded(seconds: float = SECONDS) -> Iterator[None]:
    """Ends the block with a TimeoutError after `seconds`, with a MemoryError where it takes NUM_BYTES more than before.

    The kernel keeps both limits: an alarm interrupts Python code wherever it is, and arithmetic with huge numbers; a
    limit on the address space fails the very allocation that goes too far, inside a call into C too. No thread or
    process is left behind. Only the main thread receives signals, and elsewhere other threads would meet the memory
    limit: in another thread, such as that of a validation beside training, the block runs without limits. A block
    inside another costs nothing: the outer one's limits hold."""
    if _inside or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        if _inside:
            raise TimeoutError(f"it takes more than {seconds:g} s")

    started, limits = time.monotonic(), resource.getrlimit(resource.RLIMIT_AS)
    allowed = [limit for limit in (_address_space() + NUM_BYTES, *limits) if limit != resource.RLIM_INFINITY]
    handler = signal.signal(signal.SIGALRM, late)
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_SECONDS)
    _inside.append(seconds)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (min(allowed), limits[1]))
        yield
    finally:
        _inside.clear()
        resource.setrlimit(resource.RLIMIT_AS, limits)
        passed = time.monotonic() - started
        signal.setitimer(signal.ITIMER_REAL, remaining and max(remaining - passed, 1e-3), interval)
        signal.signal(signal.SIGALRM, handler)


def cause(error: Exception) -> str:
    """The text of what ended a block, which a MemoryError does not have."""
    return (
        f"it takes more than {NUM_BYTES >> 30} GiB of memory"
        if isinstance(error, MemoryError)
        else str(error).rstrip(".")
    )


def _address_space() -> int:
    """Bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_bytes().split(b" ", 1)[0]) * resource.getpagesize()
