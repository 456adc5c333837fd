# SPDX-License-Identifier: Apache-2.0
"""The folder of a quickstart: what may be removed in it. What it learns: tests/cli/test_app.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from whet.errors import ConfigError, StorageError
from whet.trainers.quickstart import MARK, WRITTEN, clear, quickstart


def filled(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    return folder


@pytest.mark.parametrize("names", [["thesis.tex"], ["rl/notes.md"], ["summary.json", "rl_model/x", "thesis.tex"]])
def test_a_foreign_folder_is_left_alone(names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, *names)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^\. holds .*, which no quickstart wrote; name a new or empty folder with"):
        quickstart(Path(), 0)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(names)


def test_its_own_folder_loses_what_it_wrote_and_nothing_else(tmp_path: Path) -> None:
    own = filled(tmp_path / "own", "rl/config.yaml", "summary.json", "notes.md", MARK)
    (own / "model").symlink_to(filled(tmp_path / "elsewhere", "weights"))
    clear(own).close()
    assert {path.name for path in own.iterdir()} == {"notes.md", MARK}
    assert (tmp_path / "elsewhere" / "weights").exists()


@pytest.mark.parametrize("kind", ["new", "empty", "of an earlier version"])
def test_a_folder_that_is_free_is_taken(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    if kind != "new":
        folder.mkdir()
    if kind == "of an earlier version":
        filled(folder, *WRITTEN)
    with clear(folder):
        assert [path.name for path in folder.iterdir()] == [MARK]


def test_a_file_in_its_place_is_named(tmp_path: Path) -> None:
    filled(tmp_path, "file")
    with pytest.raises(StorageError, match=r"file: .* expected a folder that can be written to: .* another --run-dir"):
        clear(tmp_path / "file")
