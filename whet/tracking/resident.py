# SPDX-License-Identifier: Apache-2.0
"""Memory of this process as the operating system counts it."""

from __future__ import annotations

import re
from pathlib import Path

STATUS = Path("/proc/self/status")


def status_bytes(name: str) -> int:
    """Returns a line of the process's status file: VmRSS is in memory now, VmHWM the most that there has been; 0 where
    the system does not say."""
    found = re.search(rf"^{name}:\s+(\d+) kB", STATUS.read_text(), re.MULTILINE) if STATUS.exists() else None
    return int(found[1]) * 1024 if found else 0
