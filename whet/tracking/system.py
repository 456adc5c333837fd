# SPDX-License-Identifier: Apache-2.0
"""Memory, processor time and accelerator memory of a run's processes, by step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch

PROC = Path("/proc")
GIB = 2**30


class SystemMeter:
    """Measures the process of the loop (`driver`) and all processes that it started (`workers`: ranks, rewards,
    environments) since the last measurement; those on other machines are not seen."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._at = clock, clock()
        self._seconds = {name: sum(map(_cpu_seconds, pids)) for name, pids in _processes().items()}

    def measure(self) -> dict[str, float]:
        """The metrics `system/...`: resident memory in GiB, processor cores in use, and on an accelerator the largest
        memory of tensors in GiB."""
        now, found = self._clock(), dict[str, float]()
        passed, self._at = max(now - self._at, 1e-9), now
        for name, pids in _processes().items():
            seconds = sum(map(_cpu_seconds, pids))
            busy = max(0.0, seconds - self._seconds.get(name, 0.0))  # a process that ended takes its seconds with it
            self._seconds[name] = seconds
            found[f"system/{name}/memory_gib"] = sum(map(_resident_bytes, pids)) / GIB
            found[f"system/{name}/cpu_cores"] = busy / passed
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["system/driver/accelerator_gib"] = torch.cuda.max_memory_allocated() / GIB
        return found


def _processes() -> dict[str, list[int]]:
    below = list(_descendants(os.getpid()))
    return {"driver": [os.getpid()], **({"workers": below} if below else {})}


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):  # it has ended
        for thread in (PROC / str(pid) / "task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from _descendants(child)


def _cpu_seconds(pid: int) -> float:
    with suppress(OSError):
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()  # the name before may have spaces
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _resident_bytes(pid: int) -> int:
    with suppress(OSError):
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
