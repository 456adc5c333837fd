# SPDX-License-Identifier: Apache-2.0
"""A whole run with rollouts on two processes: killed and resumed, exported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from whet.engines.megatron import sizes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sizes.is_installed(), reason="no megatron-core: make megatron"),
]
SCRIPT = Path(__file__).parents[3] / "examples" / "survive_kills.py"
OPTIONS = {"tensor": 2, "distributed_optimizer": "true"}


@pytest.mark.timeout(1200)
def test_a_run_that_is_killed_has_the_same_numbers(tmp_path: Path) -> None:
    options = [f"actor.engine.options.{name}={value}" for name, value in OPTIONS.items()]
    command = [sys.executable, str(SCRIPT), "--kills=1", f"--folder={tmp_path}", "cluster.processes=2"]
    done = subprocess.run(
        [*command, "actor.engine.name=megatron", *options], capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
