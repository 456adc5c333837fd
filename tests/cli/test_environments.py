# SPDX-License-Identifier: Apache-2.0
"""`whet env`: the list, and one environment."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.raising import raises
from whet import registry
from whet.cli.app import main
from whet.errors import RegistryError
from whet.planning import doctor
from whet.registry import ENVIRONMENTS

BROKEN = re.compile("entry point broken|broken_games")


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
    text = "[whet.environment]\npuzzle = whet_environments.sokoban:Sokoban\n[whet.reward]\nscore = games:score\n"
    install(tmp_path, monkeypatch, text)
    clear_installed()
    try:
        assert "puzzle" in ENVIRONMENTS and "score" not in ENVIRONMENTS
        assert ENVIRONMENTS["puzzle"].target == "whet_environments.sokoban:Sokoban"
        assert re.search(r"^  puzzle +Sokoban in a random room", printed(capsys, "list"), re.MULTILINE)
    finally:
        clear_installed()


@pytest.mark.parametrize("code", ["import no_such_package", "1 / 0", "Puzzle = 1", "class Puzzle: ..."])
def test_a_broken_package_is_listed_with_its_error(
    code: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("environment", "rollout", "engine", "command")
    install(tmp_path, monkeypatch, "".join(f"[whet.{kind}]\nbroken = broken_games:Puzzle\n" for kind in kinds))
    monkeypatch.delitem(sys.modules, "broken_games", raising=False)
    (tmp_path / "broken_games.py").write_text(f"{code}\n")
    clear_installed()
    try:
        line = re.search(r"^  broken +(.*)$", printed(capsys, "list"), re.MULTILINE)
        engines = {each.what: each for each in doctor._engines({})}
        if code.startswith("class"):
            assert ENVIRONMENTS["broken"].name == "broken"
            return
        assert line is not None and {*BROKEN.findall(line[1])} == {"entry point broken", "broken_games"}
        for key in ("engine.name=broken", "rollout.engine.name=broken"):
            assert engines[key].status == "note" and "entry point broken" in BROKEN.findall(engines[key].found)
        for kind in (ENVIRONMENTS, registry.ENGINES):
            with raises(RegistryError, re.compile("^entry point broken")):
                kind["broken"]
        with pytest.raises(SystemExit) as ended:
            main(["broken"])
        assert ended.value.code == 2
    finally:
        clear_installed()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entry_points: str) -> None:
    """Makes a package with entry points in a folder, and puts the folder on the Python path."""
    info = folder / "games-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: games\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(str(folder))


def clear_installed() -> None:
    """Lets the registry search the installed packages again."""
    registry.entry_points.cache_clear()
    for kind in (ENVIRONMENTS, registry.ENGINES, registry.ROLLOUT_ENGINES):
        vars(kind).pop("_installed", None)


def test_show_prints_description_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "show", "whet_environments.frozen_lake:FrozenLake")
    assert "FrozenLake on a random map: 1 at the goal" in out
    assert "environment.options.ice             0.75 (a number >= 0 and <= 1)\n" in out
    if "sokoban" not in ENVIRONMENTS.names():
        said = printed(capsys, "play", "sokoban", status=2)
        assert re.search("sokoban; .*calculator, gymnasium, single_turn.* pip install -e ", said)
    assert re.search("calculater; .*'calculator'", printed(capsys, "show", "calculater", status=2))
