# SPDX-License-Identifier: Apache-2.0
"""TRL's own virtual environment: its pins never dictate whet's."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.competitor import ROOT

log = logging.getLogger(__name__)
CONSTRAINTS = ROOT / "benchmarks" / "constraints-trl.txt"
FOLDER = ROOT / ".venv-trl"
READY = FOLDER / ".ready"


def find() -> Path | None:
    """Its interpreter, where there is one: in the folder that WHET_TRL_VENV names, or in .venv-trl."""
    named = os.environ.get("WHET_TRL_VENV")
    if named is not None:
        python = Path(named) / "bin" / "python"
        if not python.exists():
            raise FileNotFoundError(f"WHET_TRL_VENV={named} has no bin/python; unset it to have .venv-trl made")
        return python
    is_current = READY.exists() and READY.stat().st_mtime >= CONSTRAINTS.stat().st_mtime
    return FOLDER / "bin" / "python" if is_current else None


def find_or_make() -> Path:
    """Its interpreter; makes .venv-trl where there is none, which downloads torch once more."""
    found = find()
    if found is not None:
        return found
    log.info("making %s with what %s pins; this takes minutes", FOLDER.name, CONSTRAINTS.name)
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    pip = [str(FOLDER / "bin" / "pip"), "install", "--quiet", "-c", str(CONSTRAINTS)]
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, "trl", "pillow"], check=True)
    READY.touch()
    return FOLDER / "bin" / "python"
