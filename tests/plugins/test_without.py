# SPDX-License-Identifier: Apache-2.0
"""The fast tests without one plugin, another at each commit: tests that ask for it are skipped, all others pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import whet
from whet.manifests import manifests

pytestmark = pytest.mark.slow
ROOT = Path(whet.__file__).parents[1]


def git(*words: str, folder: Path = ROOT) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def plugin_in_turn() -> str:
    """The plugin of this commit, or of the environment variable WHET_WITHOUT."""
    names = sorted(manifests())
    return os.environ.get("WHET_WITHOUT") or names[int(git("rev-parse", "HEAD")[:8], 16) % len(names)]


@pytest.mark.timeout(1200)
def test_the_fast_tests_pass_without_a_plugin(tmp_path: Path) -> None:
    plugin, folder = plugin_in_turn(), tmp_path / "whet"
    git("clone", "--quiet", str(ROOT), str(folder))
    if (shared := ROOT.parent / "shared").is_dir():
        (tmp_path / "shared").symlink_to(shared.resolve())
    git("rm", "-rq", f"whet/plugins/{plugin}", f"tests/plugins/{plugin}", folder=folder)
    words = ["-m", "not slow", "-n", "2", "--dist", "worksteal", "--without", plugin, "-rfE", "tests"]
    own = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=folder,
        env=own,
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
    )
    assert done.returncode == 0, f"without {plugin}:\n{done.stdout[-4000:]}"
