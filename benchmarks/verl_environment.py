# SPDX-License-Identifier: Apache-2.0
"""verl's own virtual environment, which `make peers` makes for the tests too."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.competitor import ROOT


def find() -> Path | None:
    """Its interpreter, in the folder that WHET_PEERS_VENV names, or in .venv-peers; None where there is none."""
    python = Path(os.environ.get("WHET_PEERS_VENV") or ROOT / ".venv-peers") / "bin" / "python"
    return python if python.exists() else None
