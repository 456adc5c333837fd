# SPDX-License-Identifier: Apache-2.0
"""Whet without one of its plugins, and without all of them: commands, types and a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import whet
from whet.manifests import manifests

pytestmark = pytest.mark.slow
ALL = "*"
ROOT = Path(whet.__file__).parents[1]
SMOKE = Path(__file__).with_name("smoke.py")


def without(plugin: str, folder: Path) -> Path:
    """Copies whet without a plugin, or without any."""
    shutil.copytree(ROOT / "whet", folder / "whet", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(folder / "whet" / "plugins" / ("" if plugin == ALL else plugin))
    return folder


def output(folder: Path, *words: str, status: int = 0) -> str:
    """The output of a Python process that imports the whet in a folder."""
    own = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=own, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == status, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout + done.stderr


@pytest.mark.parametrize("plugin", [*manifests(), ALL])
def test_whet_is_whole_without_it(plugin: str, tmp_path: Path) -> None:
    folder = without(plugin, tmp_path)
    gone = manifests() if plugin == ALL else {plugin: manifests()[plugin]}
    commands = [name for offered in gone.values() for name in offered.get("command", {})]
    help_text = output(folder, "-m", "whet", "--help")
    assert " train " in help_text and not [name for name in commands if f"│ {name} " in help_text]
    for group, _, own in (name.rpartition(" ") for name in commands):
        assert not group or own not in output(folder, "-m", "whet", group, "--help")
    for name in commands:
        owner = next(each for each, offered in gone.items() if name in offered.get("command", {}))
        said = output(folder, "-m", "whet", *name.split(), status=2)
        assert f"whet/plugins/{owner} back" in " ".join(said.split())
    (folder / "work").mkdir()
    assert f"smoke: {folder}" in output(folder, str(SMOKE), str(folder / "work"))


@pytest.mark.parametrize("plugin", manifests())
def test_the_shape_of_the_package_holds_without_it(plugin: str, tmp_path: Path) -> None:
    folder, test = without(plugin, tmp_path), "tests/test_architecture.py"
    for each in (
        test,
        "tests/first.py",
        "tests/parsed.py",
        "docs/__init__.py",
        "docs/architecture.md",
        "pyproject.toml",
    ):
        (folder / each).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / each, folder / each)
    shutil.copytree(ROOT / "docs" / "generate", folder / "docs" / "generate")
    words = ("-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-m", "not slow", test)
    assert " passed" in output(folder, *words)


def test_the_types_of_the_core_need_no_plugin(tmp_path: Path) -> None:
    folder = without(ALL, tmp_path)
    shutil.copy(ROOT / "pyproject.toml", folder)
    output(folder, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "-p", "whet")
