# SPDX-License-Identifier: Apache-2.0
"""What workers run on."""

from __future__ import annotations

import os
from dataclasses import dataclass

from whet.errors import ConfigError


@dataclass(frozen=True)
class ResourcePool:
    """Processes on this machine. Each hosts one rank of every role that is launched on the pool."""

    processes: int = 1

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ConfigError(f"a pool of {self.processes} processes: expected at least 1; set cluster.processes")

    @property
    def threads_per_process(self) -> int:
        """Cores this program may use, shared out evenly; at least 1."""
        cores = len(os.sched_getaffinity(0)) if "sched_getaffinity" in vars(os) else os.cpu_count() or 1
        return max(1, cores // self.processes)
