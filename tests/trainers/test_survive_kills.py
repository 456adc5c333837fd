# SPDX-License-Identifier: Apache-2.0
"""The script that a user runs: a run killed at random moments ends with the bits of one that never was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "survive_kills.py"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("kills", "rollout"), [(20, "native"), (4, "hf")])
def test_a_run_that_is_killed_again_and_again(kills: int, rollout: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(SCRIPT),
        f"--kills={kills}",
        f"--folder={tmp_path}",
        f"rollout.engine.name={rollout}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"\nkilled {kills} times: " in done.stdout
    assert "equal byte for byte: metrics.jsonl and " in done.stdout
