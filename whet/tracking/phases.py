# SPDX-License-Identifier: Apache-2.0
"""Seconds of a run by phase, each second in the innermost phase that it fell into."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BETWEEN = "between steps"
NAMES = {"step": "rest of the steps"}


class PhaseClock:
    """Counts from when it is made; `metrics.watching(clock.phase)` tells it of phases."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._last = clock, clock()
        self._open = [BETWEEN]
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Seconds of the block, less those of phases inside it, go to `name`."""
        short = name.removeprefix("time/")
        self._turn()
        self._open.append(NAMES.get(short, short))
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def table(self) -> str:
        """A line for each phase, the longest first."""
        self._turn()
        total = sum(self.seconds.values())
        rows = [*sorted(self.seconds.items(), key=lambda row: -row[1]), ("all", total)]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {each:10,.2f} s  {each / max(total, 1e-9):5.1%}" for name, each in rows]
        return "\n".join(["where the time went:", *lines])

    def _turn(self) -> None:
        now = self._clock()
        self.seconds[self._open[-1]] += now - self._last
        self._last = now
