# SPDX-License-Identifier: Apache-2.0
"""Limits of time and memory for input that may be malicious: endless templates, documents that expand without end."""

from __future__ import annotations

import json
import math
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

SECONDS = 10.0
NUM_BYTES = 2**30
REPLY_BYTES = 16 * 2**20  # of the reply of a server
REPLY_DEPTH = 64
_AGAIN_SECONDS = 1.0  # between alarms, because the block may catch the first TimeoutError
_inside: list[float] = []  # the time limit of the main thread's current block


@contextmanager
def bounded(seconds: float = SECONDS) -> Iterator[None]:
    """Ends the block with a TimeoutError after `seconds` of the thread's processor time, or three times as many of the
    clock (so that a busy machine ends nothing early), and with a MemoryError if it needs NUM_BYTES more memory.

    The kernel enforces both limits: an alarm interrupts Python code and arithmetic with huge numbers; a limit on the
    address space fails the allocation that exceeds it, also inside C code. No thread or process is left behind. Only
    the main thread receives signals, and the memory limit would affect other threads: so in any other thread, such as
    the thread of a validation in parallel with training, the block runs without limits. A nested block has the limits
    of the outer block."""
    if _inside or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        if _inside and (time.thread_time() - worked > 0.95 * seconds or time.monotonic() - started > 3 * seconds):
            raise TimeoutError(f"it needs more than {seconds:g} s")

    started, worked, limits = time.monotonic(), time.thread_time(), resource.getrlimit(resource.RLIMIT_AS)
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
    """Returns the message of the error that ended a `bounded` block. (A MemoryError has no message of its own.)"""
    if isinstance(error, MemoryError):
        return f"it needs more than {NUM_BYTES >> 30} GiB of memory"
    return str(error).rstrip(".")


def read_json(content: bytes | str, most: int = REPLY_BYTES) -> Any:
    """Parses JSON from a server that may be malicious.  Raises: ValueError for invalid JSON, for more than `most` bytes
    or REPLY_DEPTH levels, and for a number that does not fit into a float."""
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    try:
        value = json.loads(content, parse_constant=_number, parse_float=_number, parse_int=_number)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {REPLY_DEPTH} levels deep") from error
    level = [value]
    for _ in range(REPLY_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [each for outer in inner for each in outer]
    if level:
        raise ValueError(f"it is nested more than {REPLY_DEPTH} levels deep")
    return value


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it has the number {text[:20]}, which no float holds")
    return int(text) if text.lstrip("-").isdecimal() else value


def _address_space() -> int:
    """Returns the bytes of address space that this process has mapped."""
    return int(Path("/proc/self/statm").read_bytes().split(b" ", 1)[0]) * resource.getpagesize()
