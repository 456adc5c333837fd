# SPDX-License-Identifier: Apache-2.0
"""The folder of a quickstart: the files that may be removed in it. tests/cli/test_app.py tests its learning."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.raising import raises
from whet.errors import ConfigError, StorageError
from whet.plugins.lessons.quickstart import ADDITION, MARK, WRITTEN, clear, is_good, quickstart, show
from whet.tracking.console import shared_console


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
    with raises(ConfigError, key="--run-dir", found=re.compile(rf"^\., .*{Path(names[0]).parts[0]}")):
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
    with raises(StorageError, key=f"{tmp_path / 'file'}", change=re.compile("--run-dir$")):
        clear(tmp_path / "file")


def history(*accuracies: float | None) -> Any:
    """A run with these accuracies, in the order of its lines; None: a line without a validation."""
    lines = [{"step": step, **({} if each is None else {"val/accuracy": each})} for step, each in enumerate(accuracies)]
    return SimpleNamespace(history=lines)


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ((0.4,), False),
        ((0.99,), False),  # once
        ((0.97, 0.99), False),
        ((0.98, 0.98), True),
        ((0.99, None, None, 1.0), True),  # a validation does not follow every step
        ((0.99, 1.0, None), False),  # said at the validation, not at every line behind it
        ((1.0, 0.979, 1.0), False),  # not in a row
    ],
)
def test_training_ends_where_the_accuracy_is_high_twice_in_a_row(
    accuracies: tuple[float | None, ...], expected: bool
) -> None:
    assert is_good(history(*accuracies)) is expected


@pytest.mark.parametrize("name", ["qs", "a" * 60, "with [red]brackets[/red]", "it's a b"])
def test_paths_are_whole_and_commands_stand_apart_from_what_they_do(name: str, tmp_path: Path) -> None:
    run_dir, written = tmp_path / name / "quickstart", io.StringIO()
    summary = {"held_out_problems": 2, "sft_accuracy": 0.5, "rl_accuracy": 1.0, "seconds_total": 1.0}
    console = Console(file=written, width=80, force_terminal=False, highlight=False)
    show(console, {**summary, "seconds_to_first_rl_step": 1.0}, [("1+1=", "2", "3", "2")], run_dir, "whet", ADDITION)
    lines = written.getvalue().splitlines()
    places = ["learning_curve.png", "rl_model", "rl/rollouts/", "rl/metrics.jsonl"]
    assert all(any(f"{run_dir}/{place}" in line for line in lines) for place in places)
    folder = shlex.quote(str(run_dir))
    [shows] = [line for line in lines if line.startswith(f"  whet show {folder}/rl")]
    assert re.fullmatch(r" {2,}\S.*", shows.removeprefix(f"  whet show {folder}/rl")), shows
    page = next(line for line in lines if line.startswith(f"  whet view {folder}"))
    assert re.fullmatch(r" {2,}\S.*", page.removeprefix(f"  whet view {folder}")), page
    words = shlex.split(written.getvalue().partition(" train quickstart ")[2].partition("whet init-model")[0])
    assert {f"model.path={run_dir}/sft_model", f"data.train_files={run_dir}/train.jsonl"} <= set(words)


def test_the_lines_of_the_stages_have_whole_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class EnoughError(Exception):
        """The first lines are there."""

    def enough(*_: object) -> None:
        raise EnoughError

    run_dir = tmp_path / ("long " * 20) / "[bold]run"
    shared_console.cache_clear()
    monkeypatch.setattr("whet.plugins.lessons.quickstart.warm_up", enough)
    with pytest.raises(EnoughError):
        quickstart(run_dir, 0)
    shared_console.cache_clear()
    printed = capsys.readouterr().out
    assert f"{run_dir}/*.jsonl" in printed and f"{run_dir}/model" in printed
