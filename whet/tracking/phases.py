# SPDX-License-Identifier: Apache-2.0
"""The time of a run by phase; time in nested phases counts for the innermost one."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BETWEEN = "between steps"
NAMES = {"step": "rest of the steps"}


class PhaseClock:
    """Measures the time of each phase, from its construction on; use it with `metrics.watching(clock.phase)`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._last = clock, clock()
        self._open = [BETWEEN]
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block, without that of phases inside it, to `name`."""
        short = name.removeprefix("time/")
        self._count()
        self._open.append(NAMES.get(short, short))
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def table(self) -> str:
        """The times as text: one line for each phase, the longest first."""
        self._count()
        total = sum(self.seconds.values())
        rows = [*sorted(self.seconds.items(), key=lambda row: -row[1]), ("all", total)]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {each:10,.2f} s  {each / max(total, 1e-9):5.1%}" for name, each in rows]
        return "\n".join(["where the time went:", *lines])

    def _count(self) -> None:
        now = self._clock()
        self.seconds[self._open[-1]] += now - self._last
        self._last = now
