# SPDX-License-Identifier: Apache-2.0
"""Memory of all processes below one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def memory_below(pid: int, limit_bytes: float) -> int:
    """Bytes of memory of the processes below `pid`: the sum of what is resident in each.

    Where that of several is over the limit, pages that they share count once, which takes longer to read."""
    pids = [*_below(pid)]
    resident = sum(_kilobytes(each, "status", "VmRSS:") for each in pids) * 1024
    if resident <= limit_bytes or len(pids) == 1:
        return resident
    return sum(_kilobytes(each, "smaps_rollup", "Pss:") or _kilobytes(each, "status", "VmRSS:") for each in pids) * 1024


def _below(pid: int) -> Iterator[int]:
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from _below(child)


def _kilobytes(pid: int, file: str, name: str) -> int:
    """A number of a process; 0 where it has ended, or is of another user."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
    return 0
