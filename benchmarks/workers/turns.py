# SPDX-License-Identifier: Apache-2.0
"""A worker's side of taking turns: one JSON object a line each way. Only the standard library, for any environment."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers")


class Turns:
    """The worker computes only between `wait` and `done`; then it is another's turn.

    Produces: for each turn its seconds, the peak memory of the process so far, and what the worker adds.
    Consumes: its settings, once.  Waits: on the parent, for its next turn; it ends when the parent closes the pipe.
    """

    def __init__(self) -> None:
        # Standard output belongs to the parent: whatever libraries print goes where errors go.
        self._replies = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.settings: dict[str, Any] = json.loads(sys.stdin.readline())
        self._start: float | None = None

    def ready(self, *packages: str, **numbers: Any) -> None:
        """Everything is loaded. `packages` are those whose version matters beside torch and transformers."""
        versions = {name: version(name) for name in (*PACKAGES, *packages)}
        self._reply({"versions": versions, "loaded_bytes": _memory("VmRSS"), **numbers})

    def wait(self) -> None:
        """Returns when it is this worker's turn.  Raises: SystemExit when there is none any more."""
        if not sys.stdin.readline():
            raise SystemExit(0)
        self._start = time.perf_counter()

    def done(self, **numbers: Any) -> None:
        """Ends the turn."""
        assert self._start is not None
        seconds = time.perf_counter() - self._start
        self._reply({"seconds": seconds, "peak_bytes": _memory("VmHWM"), **numbers})

    def _reply(self, message: dict[str, Any]) -> None:
        self._replies.write(json.dumps(message) + "\n")
        self._replies.flush()


def _memory(name: str) -> int:
    """Bytes of resident memory: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
