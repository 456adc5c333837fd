# SPDX-License-Identifier: Apache-2.0
"""How tests ask a peer's own functions: a worker in its environment, calls in one file, results in another."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 600


def interpreter(variable: str, folder: str) -> Path:
    """The interpreter of the environment that the variable names, or of `folder`; without one the test is skipped."""
    found = Path(os.environ.get(variable) or ROOT / folder)
    if not (found / "bin" / "python").exists():
        pytest.skip(f"{found} is not there: `make peers` makes it")
    return found / "bin" / "python"


def ask(python: Path, worker: Path, folder: Path, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The peer's results of the calls."""
    torch.save(list(calls), folder / "calls.pt")
    command = [str(python), str(worker), str(folder / "calls.pt"), str(folder / "results.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[Any] = torch.load(folder / "results.pt")
    assert len(results) == len(calls)
    return results
