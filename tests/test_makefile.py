# SPDX-License-Identifier: Apache-2.0
"""The commands that `make` would run, without running them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def commands(target: str) -> list[str]:
    """The commands of a target, as if nothing were made yet."""
    words = ["make", "--dry-run", "--always-make", target]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_the_quickstart_installs_what_it_needs_and_shows_the_download_of_torch() -> None:
    installs = [line for line in commands("quickstart") if "pip install" in line]
    assert not [line for line in installs if "[" in line], "an extra of the package"
    [torch, whet] = installs
    assert torch.split()[-1] == "torch" and "--quiet" not in torch and "-q" not in torch.split()
    assert whet.endswith("-e .")
    assert any("[dev]" in line for line in commands("test"))
