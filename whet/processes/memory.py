# SPDX-License-Identifier: Apache-2.0
"""Memory of all processes below one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_below(pid: int, limit_bytes: float) -> int:
    """Bytes of memory of the processes below `pid`.

    It is the sum of what is resident in each. Where that of several is over the limit, pages that they share count
    once (proportional set size), which takes longer to read."""
    pids = [*_below(pid)]
    resident = sum(map(_resident, pids))
    return resident if resident <= limit_bytes or len(pids) == 1 else sum(map(_proportional, pids))


def _below(pid: int) -> Iterator[int]:
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from _below(child)


def _resident(pid: int) -> int:
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    return 0


def _proportional(pid: int) -> int:
    with suppress(OSError):
        found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else 0
    return _resident(pid)  # of another user
