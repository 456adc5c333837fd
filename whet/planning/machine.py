# SPDX-License-Identifier: Apache-2.0
"""Free memory of this machine (within control groups and `ulimit -v`) and of its accelerators, and free disk."""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from whet.config.cluster import ClusterConfig
from whet.errors import ConfigError
from whet.planning.units import size

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
ANYWAY = "WHET_START_ANYWAY"  # environment variable: starts a run even if it does not fit by the estimate


@dataclass(frozen=True)
class FreeMemory:
    """The bytes that this process can still allocate, and the limit that bounds them."""

    bytes: int
    bound: str
    total: int = 0  # all bytes of an accelerator, from which unset sizes are derived; 0: unknown


def free_memory() -> FreeMemory | None:
    """Returns the least free memory among machine, control groups and `ulimit -v`; None if unknown."""
    found = [*_machine(), *_control_groups(), *_address_space()]
    return min(found, key=lambda free: free.bytes, default=None)


def uses_accelerators(cluster: ClusterConfig) -> bool:
    """Tells whether a run computes on accelerators: reserved by Ray, or enough of them on this machine."""
    from whet import devices

    return any(cluster.gpus) if cluster.backend == "ray" else devices.count() >= cluster.devices


def free_accelerator(cluster: ClusterConfig) -> FreeMemory | None:
    """Returns the free memory of the fullest accelerator that a run would use; None for a run on the host."""
    from whet import devices  # takes seconds, too long for the first lines of `whet plan`

    if not uses_accelerators(cluster):
        return None
    found, ray = devices.count(), cluster.backend == "ray"
    if not found:
        return FreeMemory(sys.maxsize, "an accelerator that this machine does not see")
    uses = [devices.memory(index) for index in range(found if ray else cluster.devices)]
    known = [use for use in uses if use is not None]
    if len(known) < len(uses):
        return FreeMemory(sys.maxsize, "an accelerator that does not report its memory")
    return FreeMemory(min(use.free for use in known), "each accelerator", min(use.total for use in known))


def stated(gib: float | None, name: str) -> FreeMemory | None:
    """Converts a memory size that the user stated for `name`, such as "an accelerator"; None if not stated.

    Raises: ConfigError."""
    if gib is None:
        return None
    if not 0 < gib < math.inf:
        raise ConfigError(f"memory of {name}", f"{gib:g} GiB", "more than 0, such as 80 GiB", "state another size")
    return FreeMemory(round(gib * 2**30), f"{name} of {gib:g} GiB", round(gib * 2**30))


def total_memory() -> int | None:
    """Returns the total memory of the machine, without limits."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def free_disk(path: Path) -> int:
    """Returns the free bytes of the disk at `path`, which need not exist yet."""
    return shutil.disk_usage(existing(path)).free


def check_disk(needed: int, run_dir: Path, reclaimed_bytes: int = 0) -> None:
    """Checks that a checkpoint of `needed` bytes fits onto the disk.  Raises: ConfigError."""
    free = free_disk(run_dir) + reclaimed_bytes
    if needed > free and os.environ.get(ANYWAY, "0") in ("", "0"):
        found, expected = f"a checkpoint needs about {size(needed)}", f"at most {size(free)}, free in {run_dir}"
        change = "free disk space, choose another trainer.run_dir"
        raise ConfigError("disk", found, expected, f"{change}, or set {ANYWAY}=1 in the environment to go on anyway")


def existing(path: Path) -> Path:
    """Returns the path itself or its nearest parent that is an existing folder."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if os.path.isdir(each))  # noqa: PTH112  # never raises


def _machine() -> Iterator[FreeMemory]:
    available, total = _kilobytes(PROC / "meminfo", "MemAvailable"), total_memory()
    if available is not None:
        yield FreeMemory(available, "the machine's memory")
    elif total is not None:
        yield FreeMemory(total, "the machine's memory, other programs not counted")


def _control_groups() -> Iterator[FreeMemory]:
    """Yields the free memory of this process's control groups (both versions), counting inactive file pages as free."""
    for line in _lines(PROC / "self" / "cgroup"):
        _, controllers, group = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        root, names = CGROUPS, ("memory.max", "memory.current", "inactive_file")
        if controllers:  # version 1
            root = CGROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        folder = root / group.strip("/")
        for each in (folder, *folder.parents):
            if root not in (each, *each.parents):
                break
            limit, used = (_number(each / name) for name in names[:2])
            if limit is not None and used is not None:
                pages = re.search(rf"^{names[2]} (\d+)", "\n".join(_lines(each / "memory.stat")), re.MULTILINE)
                yield FreeMemory(limit - used + (int(pages[1]) if pages else 0), f"the control group {each}")


def _address_space() -> Iterator[FreeMemory]:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        yield FreeMemory(
            limit - (_kilobytes(PROC / "self" / "status", "VmSize") or 0), "the limit on address space (ulimit -v)"
        )


def _number(path: Path) -> int | None:
    """Reads a number from a file; None for a missing file, or for `max`."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _kilobytes(path: Path, name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", "\n".join(_lines(path)), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
