# SPDX-License-Identifier: Apache-2.0
"""`whet env`: the list, and one environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from whet import registry
from whet.cli.app import main
from whet.registry import ENVIRONMENTS


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["env", *arguments])
    captured = capsys.readouterr()
    assert (exit_.value.code or 0) == status, captured.err
    return captured.err if status == 2 else captured.out


def test_list_names_each_environment(capsys: pytest.CaptureFixture[str]) -> None:
    title, *lines = printed(capsys, "list").splitlines()
    assert title == "environment  environment.name"
    assert [line.split()[0] for line in lines[: len(ENVIRONMENTS.names())]] == ENVIRONMENTS.names()
    assert printed(capsys) == printed(capsys, "list")


def test_an_installed_package_adds_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "games-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: games\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[whet.environment]\npuzzle = whet_environments.sokoban:Sokoban\n[whet.reward]\nscore = games:score\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    clear_installed()
    try:
        assert "puzzle" in ENVIRONMENTS and "score" not in ENVIRONMENTS
        assert ENVIRONMENTS["puzzle"].target == "whet_environments.sokoban:Sokoban"
        assert re.search(r"^  puzzle +Sokoban in a random room", printed(capsys, "list"), re.MULTILINE)
    finally:
        clear_installed()


def clear_installed() -> None:
    """Lets the registry search the installed packages again."""
    registry.entry_points.cache_clear()
    vars(ENVIRONMENTS).pop("_installed", None)


def test_show_prints_description_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "show", "whet_environments.frozen_lake:FrozenLake")
    assert "FrozenLake on a random map: 1 at the goal" in out
    assert "environment.options.ice             0.75 (a number >= 0 and <= 1)\n" in out
    if "sokoban" not in ENVIRONMENTS.names():
        said = printed(capsys, "play", "sokoban", status=2)
        assert re.search("sokoban; .*calculator, gymnasium, single_turn.* pip install -e ", said)
    assert re.search("calculater; .*'calculator'", printed(capsys, "show", "calculater", status=2))
