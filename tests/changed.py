# SPDX-License-Identifier: Apache-2.0
"""Prints the test files of the changes since the last commit, for `make commit`. `tests/` mirrors the code by path."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = "tests/test_architecture.py"


def mirror_of(path: str, root: Path = ROOT) -> str | None:
    """The test file of a changed file, or the folder of tests where none has its name; None where nothing tests it."""
    place = Path(path)
    if place.suffix != ".py":
        return "tests/test_readme.py" if path == "README.md" else None
    if place.parts[0] == "tests" and place.name.startswith("test_"):
        return path if (root / path).exists() else None
    inner = place.parent.parts[1:] if place.parts[0] in ("whet", "tests") else place.parent.parts
    folder = Path("tests", *inner)
    while not (root / folder).is_dir():
        folder = folder.parent
    own = folder / f"test_{place.name}"
    if (root / own).exists():
        return str(own)
    return str(folder) if folder != Path("tests") else None


def chosen(paths: Sequence[str], root: Path = ROOT) -> list[str]:
    """The tests of all changed files, each once, and the architecture test."""
    found = {mirror_of(path, root) for path in paths} - {None} | {ALWAYS}
    return sorted(str(each) for each in found)


def changed() -> list[str]:
    """Files that differ from the last commit, new ones among them."""
    told = [
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for words in (("diff", "--name-only", "HEAD"), ("ls-files", "--others", "--exclude-standard"))
    ]
    return "".join(told).splitlines()


if __name__ == "__main__":
    sys.stdout.write("\n".join(chosen(changed())) + "\n")
