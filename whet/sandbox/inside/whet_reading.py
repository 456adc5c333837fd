# SPDX-License-Identifier: Apache-2.0
"""Reads what a program has: its processes, their memory, the files that it leaves; nothing of whet is imported."""

from __future__ import annotations

import os

PAGE = os.sysconf("SC_PAGE_SIZE")


def open_beneath(folder: int, name: str) -> int:
    """Opens a file below a folder, through no link.  Raises: OSError."""
    *above, last = name.split("/")
    folder = os.dup(folder)
    try:
        for each in above:
            if each in ("", ".."):
                raise FileNotFoundError(name)
            outer, folder = folder, os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(outer)
        return os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)


def descendants() -> list[int]:
    """The processes that descend from this one."""
    found = [os.getpid()]
    for each in found:
        try:
            for task in os.listdir(f"/proc/{each}/task"):
                with open(f"/proc/{each}/task/{task}/children") as file:
                    found += map(int, file.read().split())
        except OSError:  # it has ended
            continue
    return found[1:]


def resident(pid: int) -> int:
    """Bytes of memory of a process."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * PAGE
    except OSError:
        return 0
