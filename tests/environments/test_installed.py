# SPDX-License-Identifier: Apache-2.0
"""`pip install ./examples/environments` in an environment of its own that sees the packages of this one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "examples" / "environments"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has whet-environments; whet and other packages come from this environment."""
    folder = tmp_path_factory.mktemp("installed")
    copy = folder / "environments"  # a build leaves files beside its source
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(copy)]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode and "No matching distribution found for hatchling" in done.stderr:
        pytest.skip("pip has no index here to fetch hatchling from, which builds the package")
    assert done.returncode == 0, done.stderr
    [packages] = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "these.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
    return python


def run(python: Path, folder: Path, *words: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([python, *words], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_environments_are_listed_and_played(python: Path, tmp_path: Path) -> None:
    where = run(python, tmp_path, "-c", "import whet_environments as w; print(w.__file__)").strip()
    assert Path(where).is_relative_to(python.parents[1])
    declared = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]["entry-points"]["whet.environment"]
    listed = {
        line.split()[0] for line in run(python, tmp_path, "-m", "whet", "env", "list").splitlines() if line.strip()
    }
    assert declared.keys() <= listed and len(declared) == 15


def test_its_command_plays_a_game(python: Path, tmp_path: Path) -> None:
    """The rule that reads the pixels takes the right card at the first try."""
    words = ("number-game", "--controller", "drawn", "--backend", "scripted", "--rounds", "1", "--output", "shots")
    run(python, tmp_path, "-m", "whet", "play", *words)
    [result] = map(json.loads, (each.read_text() for each in (tmp_path / "shots").rglob("result_*.json")))
    assert (result["error"], result["completed_rounds"], result["tries"]) == (None, 1, 1)
    assert result["final_score"] == result["score_on_screen"] > 0
