# SPDX-License-Identifier: Apache-2.0
"""Text adventures of TextWorld."""

import re
from pathlib import Path
from typing import Any

import pytest
from whet_environments import textworld_games
from whet_environments.textworld_games import TextWorldGames, cleaned, read_command

from tests.raising import raises
from whet.environments.protocol import Answer, Observation
from whet.errors import ConfigError
from whet.plugins.agents.check import Plan, check
from whet.types import Message, Prompt

# A game takes a second or more to generate and compile.
needs_textworld = pytest.mark.skipif(
    textworld_games.textworld is None, reason="TextWorld is not installed: pip install textworld"
)
PROMPT = Prompt("0:7", 7, (Message("user", "?"),), (1, 2), "s", None)
VERBS = ["examine", "go", "inventory", "look", "open", "take"]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("<answer>Open  the door</answer>", "open the door"),
        ("I think.\ngo east", "go east"),
        ("<answer>go west</answer> no: <answer>look</answer>", "look"),
        ("take the child's red-hot poker", "take the child's red-hot poker"),
        ("open", "open"),
        ("save", None),
        ("undo", None),
        ("look. save", None),
        ("look then save", None),
        ("look\nand more", None),
        ("look,quit", None),
        ("take " + "x" * 200, None),
        ("<answer></answer>", None),
        ("", None),
        ("上", None),
    ],
)
def test_read_command(text: str, command: str | None) -> None:
    assert read_command(text, VERBS) == command


def test_cleaned() -> None:
    said = "\n\n\nYou open it.\n\n\n\nMore.\n>            -= Kitchen =-0/1"
    assert cleaned(said) == "You open it.\n\nMore."
    assert cleaned("Won.\n\n\n                  *** The End ***\n\nRESTART or QUIT?\n>  -= Kitchen =-6/8") == "Won."


def begun(seed: int = 3, **options: Any) -> tuple[TextWorldGames, Observation]:
    game = TextWorldGames(**options)
    return game, game.reset(PROMPT, seed)


def walked(game: TextWorldGames) -> list[Observation]:
    """Plays TextWorld's own solution."""
    commands = game.state.game.metadata["walkthrough"]
    return [game.step(Answer(f"<answer>{command}</answer>")) for command in commands]


@needs_textworld
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "num_turns"),
    [({"settings": {"level": 4}}, 4), ({"game": "treasure_hunter", "settings": {"level": 11}}, 2)],
)
def test_the_solution_wins(options: dict[str, Any], num_turns: int) -> None:
    game, first = begun(**options)
    assert "Verbs: " in str(first.messages[0].content) and "-= " in str(first.messages[0].content)
    seen = walked(game)
    assert len(seen) == num_turns and [each.done for each in seen] == [False] * (num_turns - 1) + [True]
    assert [each.reward for each in seen] == [0.0] * (num_turns - 1) + [1.0]
    assert seen[-1].fields == {"success": 1.0, "score": 1.0}
    assert len({first.state_key, *(each.state_key for each in seen)}) == num_turns + 1
    with pytest.raises(RuntimeError, match="after the end"):
        game.step(Answer("look"))
    game.close()


@needs_textworld
@pytest.mark.slow
def test_points_commands_and_penalties() -> None:
    """The house of `simple` pays a point for each of seven parts; its first is in the chest drawer or the trunk."""
    game, first = begun(game="simple", commands=True, reward="points", format_penalty=0.25)
    commands = str(first.messages[0].content).rpartition("Commands: ")[2].split("; ")
    assert {"open antique trunk", "open chest drawer", "look"} <= set(commands) and commands == sorted(commands)
    assert game.choices()[0] == f"<answer>{commands[0]}</answer>"
    refused = game.step(Answer("restart"))
    assert refused.reward == -0.25 and str(refused.messages[0].content).startswith("That is no command of this game.")
    assert refused.state_key == first.state_key
    seen = walked(game)
    assert sum(each.reward for each in seen) == game.state.max_score >= 5 and seen[-1].done
    assert seen[0].reward == 1.0 and seen[0].fields["score"] == 1 / game.state.max_score
    game.close()


@needs_textworld
@pytest.mark.slow
def test_a_replaced_context_has_the_whole_state_and_the_limit_truncates() -> None:
    game, first = begun(settings={"level": 2}, context="replace", max_steps=2, max_tokens=9)
    looked = game.step(Answer("look"))
    assert looked.messages == first.messages and (looked.context, looked.max_tokens) == ("replace", 9)
    last = game.step(Answer("inventory"))
    assert last.truncated and not last.done and "carrying nothing" in str(last.messages[0].content)
    game.close()


@needs_textworld
@pytest.mark.slow
def test_compiled_games_are_kept(tmp_path: Path) -> None:
    game, first = begun(folder=str(tmp_path))
    [kept] = tmp_path.iterdir()
    before = (kept / "game.z8").stat().st_mtime_ns
    again, same = begun(folder=str(tmp_path))
    assert same == first and (kept / "game.z8").stat().st_mtime_ns == before
    other, different = begun(seed=4, folder=str(tmp_path))
    assert different.messages != first.messages and len([*tmp_path.iterdir()]) == 2
    for each in (game, again, other):
        each.close()
    own, seen = begun()
    assert seen == first and own.own_folder is not None
    folder = own.own_folder
    own.close()
    own.close()
    assert not folder.exists() and kept.exists()


@needs_textworld
@pytest.mark.slow
def test_a_row_names_its_game() -> None:
    fixed = Prompt("0:7", 7, (Message("user", "?"),), (1, 2), "s", None, extra_info={"seed": 3})
    games = [TextWorldGames(), TextWorldGames()]
    assert games[0].reset(fixed, 1) == games[1].reset(PROMPT, 3)
    for each in games:
        each.close()


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if textworld_games.textworld is not None:
        expected = re.compile("simple: rewards, goal, test")
        with raises(ConfigError, "environment.options.settings", found="depth", expected=expected):
            TextWorldGames(game="simple", settings={"depth": 1})
    monkeypatch.setattr(textworld_games, "textworld", None)
    with raises(ConfigError, re.compile("textworld"), change=re.compile(r"examples/environments\[textworld\]")):
        TextWorldGames()


@needs_textworld
@pytest.mark.slow
@pytest.mark.parametrize("game", ["coin_collector", "simple"])
def test_they_pass_the_check(game: str, tmp_path: Path) -> None:
    options = {"game": game, "folder": str(tmp_path), "max_steps": 10}
    found = check("whet_environments.textworld_games:TextWorldGames", options, Plan(PROMPT, seconds=60.0))
    assert not [finding for finding in found if finding.is_ok is False]
