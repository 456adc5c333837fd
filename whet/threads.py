# SPDX-License-Identifier: Apache-2.0
"""Settings of torch's waiting threads: how long they spin (poll without sleeping) before they release the processor, on
an idle machine and beside other programs.
The number of threads depends on the machine alone, so that two runs have equal bits."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from statistics import median

log = logging.getLogger(__name__)
# GNU's OpenMP spins 300,000 rounds, which are milliseconds, and Intel's 200 ms: on a machine with other programs a
# waiting thread then keeps a processor that the awaited thread needs. 10,000 rounds are as fast on an idle machine;
# with 1,000 a rollout of a small model takes a third longer (LOG.md). Beside other programs `Contention` sets 100.
SPINS = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
POLICY = "OMP_WAIT_POLICY"
WAITS, WAITS_NO_MORE = 0.1, 0.03  # shares of a step in which the main thread waits for a processor
SLOW = 5.0  # steps that take this many times as long as before are reported
STEPS = 5  # the median of so many steps is compared
OF_THAT = (
    "of it waiting for a processor that other programs use: end these programs, or start with OMP_NUM_THREADS=1, so "
    "that no thread waits for another (the last bits of results change); this message is not repeated"
)


def yield_soon() -> None:
    """Shortens the spinning of this process and its children, unless the user has set it.

    Call it before torch is loaded, since OpenMP reads the settings then."""
    if not os.environ.keys() & {POLICY, *SPINS}:
        os.environ.update(SPINS)


def spinning() -> str:
    """Returns the environment variables that set the spinning, as NAME=VALUE."""
    return ", ".join(f"{name}={os.environ[name]}" for name in (POLICY, *SPINS) if name in os.environ)


class Contention:
    """Makes waiting threads release the processor almost at once while other programs need it, and reports slow steps.
    `python -m benchmarks beside` measures the effect."""

    def __init__(self) -> None:
        self._crowd: threading.Event | None = None  # setting the event ends the threads of `crowd`
        self._last = deque[float](maxlen=STEPS)
        self._fastest = float("inf")
        self._is_said = False
        self.begin()

    def begin(self) -> None:
        """Records the start of a step."""
        self._began = time.monotonic(), waited_seconds()

    def end(self) -> None:
        """Records the end of the step that `begin` started."""
        seconds, waited = time.monotonic() - self._began[0], waited_seconds() - self._began[1]
        if slow := self.note(seconds, waited / max(1e-9, seconds)):
            log.warning("%s", slow)

    def close(self) -> None:
        """Lets waiting threads spin again."""
        if self._crowd is not None:
            self._crowd.set()
        self._crowd = None

    def note(self, seconds: float, waited: float) -> str:
        """Records the seconds of a step, and the share `waited` of this time that its thread waited for a processor.
        Returns a line for the user if steps became slow; "" otherwise."""
        if waited > WAITS and self._crowd is None and os.environ.get("GOMP_SPINCOUNT") == SPINS["GOMP_SPINCOUNT"]:
            self._crowd = crowd()
        elif self._crowd is not None and waited < WAITS_NO_MORE:
            self.close()
        self._last.append(seconds)
        now = median(self._last) if len(self._last) == STEPS else 0.0
        self._fastest = min(self._fastest, now or self._fastest)
        if self._is_said or now <= SLOW * self._fastest or waited <= WAITS:
            return ""
        self._is_said = True
        return f"steps take {now:.3g} s, {now / self._fastest:.1f} times as long as before, {waited:.0%} {OF_THAT}"


def waited_seconds() -> float:
    """Returns the seconds in which this process's main thread was ready but had to wait; 0 if Linux hides them."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def crowd() -> threading.Event:
    """Starts threads that sleep until the returned event is set. GNU's OpenMP counts them: while it has more threads
    than processors, waiting threads spin at most 100 rounds. Computations keep their number of threads."""
    until, loaded = threading.Event(), Path("/proc/self/maps").read_text().split()
    path = next((each for each in loaded if "libgomp" in each), None)

    def sleep() -> None:
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # each thread calls free(NULL)
        ctypes.CDLL(path).GOMP_parallel(nothing, None, (os.cpu_count() or 1) + 1, 0)
        until.wait()

    if path is not None:
        threading.Thread(target=sleep, name="whet-crowd", daemon=True).start()
    return until
