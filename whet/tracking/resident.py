# SPDX-License-Identifier: Apache-2.0
"""Memory of this process as the operating system counts it."""

from __future__ import annotations

import re
from pathlib import Path

STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """In memory now; 0 where the system does not say."""
    return status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most that there has been."""
    return status_bytes("VmHWM")


def status_bytes(name: str) -> int:
    """A line of the process's status file."""
    found = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    return int(found[1]) * 1024 if found else 0
