# SPDX-License-Identifier: Apache-2.0
"""The games of examples/environments."""

from __future__ import annotations

import random
import re
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from whet_environments.countdown import Countdown, evaluate
from whet_environments.frozen_lake import FrozenLake
from whet_environments.game import Game
from whet_environments.number_game import NumberGame
from whet_environments.sokoban import Sokoban, State
from whet_environments.tree_game import TreeGame

from tests.raising import raises
from whet.environments.protocol import Answer, Observation
from whet.errors import ConfigError
from whet.registry import ENVIRONMENTS
from whet.types import Message, Prompt

PROMPT = Prompt("0:0", 0, (Message("user", ">"),), (1,), "test", None)
GAMES: dict[str, type[Any]] = {
    "countdown": Countdown,
    "frozen_lake": FrozenLake,
    "number_game": NumberGame,
    "sokoban": Sokoban,
    "tree_game": TreeGame,
}


def text_of(observation: Observation) -> str:
    return str(observation.messages[0].content)


def sokoban(room: list[str], **options: Any) -> Sokoban:
    """A game in a room that is written out."""
    game = Sokoban(rows=len(room), columns=len(room[0]), border=False, **options)
    cells = {(y, x): symbol for y, row in enumerate(room) for x, symbol in enumerate(row)}
    game.reset(PROMPT, 0)
    game.floor = {cell for cell, symbol in cells.items() if symbol != "#"}
    game.targets = frozenset(cell for cell, symbol in cells.items() if symbol in "O√S")
    boxes = frozenset(cell for cell, symbol in cells.items() if symbol in "X√")
    game.state = State(next(cell for cell, symbol in cells.items() if symbol in "PS"), boxes)
    return game


@pytest.mark.parametrize("kind", GAMES.values())
@pytest.mark.parametrize("encoding", ["compact", "words"])
def test_perfect_play_wins_and_the_answer_after_the_end_is_refused(kind: type[Any], encoding: str) -> None:
    for seed in range(10):
        game: Game = kind(encoding=encoding)
        observation = game.reset(PROMPT, seed)
        assert observation.fields["success"] == 0.0 and observation.state_key == game.state_key()
        while not (observation.done or observation.truncated):
            assert text_of(observation).endswith(game.board() + (">" if encoding == "compact" else ""))
            observation = game.step(Answer(game.best()))
        assert observation.done and observation.fields["success"] == 1.0
        with pytest.raises(RuntimeError, match="after the end of the game"):
            game.step(Answer(""))


@pytest.mark.parametrize("kind", GAMES.values())
def test_the_seed_alone_decides(kind: type[Any]) -> None:
    def begun(prompt: Prompt, seed: int) -> str:
        random.seed(random.random())
        return text_of(kind().reset(prompt, seed))

    assert begun(PROMPT, 3) == begun(PROMPT, 3)
    assert len({begun(PROMPT, seed) for seed in range(20)}) > 10
    own = Prompt("0:0", 0, (Message("user", ">"),), (1,), "test", None, extra_info={"seed": 3})
    assert begun(own, 4) == begun(PROMPT, 3)
    with pytest.raises(ValueError, match=r"seed .*'x'"):
        kind().reset(Prompt("0:0", 0, (), (1,), "test", None, extra_info={"seed": "x"}), 0)


@pytest.mark.parametrize("kind", GAMES.values())
def test_an_invalid_answer_costs_the_penalty_and_changes_nothing(kind: type[Any]) -> None:
    game: Game = kind(encoding="words", format_penalty=0.25)
    first = game.reset(PROMPT, 0)
    observation = game.step(Answer("<answer>jump</answer> select(7)"))
    if kind is NumberGame:  # the round is lost
        assert observation.reward == pytest.approx(-0.025) and observation.fields["score"] == 90.0
    elif kind is TreeGame:
        assert observation.reward == pytest.approx(-0.025) and observation.state_key == first.state_key
    else:
        assert observation.reward == -0.25 and observation.state_key == first.state_key


def test_context_appends_or_replaces() -> None:
    for context in ("append", "replace"):
        game = FrozenLake(context=context)
        first = game.reset(PROMPT, 0)
        second = game.step(Answer("nothing"))
        assert (first.context, second.context) == (context, context)
        assert text_of(first).startswith("You walk on a frozen lake of 4 x 4 cells.")
        assert text_of(second).startswith(
            "That is no move. Answer with <answer>Up</answer>, " if context == "append" else "You walk on"
        )


def test_the_limit_of_steps_truncates() -> None:
    game = Sokoban(max_steps=2, max_tokens=7)
    assert game.reset(PROMPT, 0).max_tokens == 7
    assert not game.step(Answer("")).truncated
    last = game.step(Answer(""))
    assert (last.done, last.truncated, last.fields["success"]) == (False, True, 0.0)


def test_the_last_move_in_the_answer_counts() -> None:
    game = sokoban(["P__", "_XO"])
    game.step(Answer("<answer>Right</answer> or rather <ANSWER> down </ANSWER>"))
    assert game.board() == "___\nPXO"


def test_sokoban_rewards_by_hand() -> None:
    game = sokoban(["P_XO_", "#_XO_"], encoding="compact")

    def play(move: str) -> tuple[float, str, bool]:
        observation = game.step(Answer(move))
        return round(observation.reward, 9), game.board(), observation.done

    assert play("u") == (-0.1, "P_XO_#_XO_", False)  # the wall is in the way
    assert play("r") == (-0.1, "_PXO_#_XO_", False)
    assert play("r") == (0.9, "__P√_#_XO_", False)
    assert play("r") == (-1.1, "___SX#_XO_", False)  # the box is off its target, the player on it
    game = sokoban(["P_XO_", "#_XO_"], encoding="compact")
    for move in "rrld":
        last = play(move)
    assert last == (-0.1, "___√_#PXO_", False)
    assert play("r") == (10.9, "___√_#_P√_", True)
    assert sokoban(["PXX_O", "____O"]).after(State((0, 0), frozenset({(0, 1), (0, 2)})), "Right").player == (0, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 3, "columns": 3, "walls": 0.0},
        {"rows": 2, "columns": 5},
        {"rows": 4, "columns": 4, "boxes": 2},
        {"rows": 6, "columns": 5, "boxes": 3, "walls": 0.2, "pulls": 12},
        {"rows": 8, "columns": 8, "boxes": 1, "walls": 0.3, "pulls": 30},
    ],
)
def test_rooms_can_be_solved(options: dict[str, Any]) -> None:
    for seed in range(15):
        game = Sokoban(**options, max_steps=1000)
        game.reset(PROMPT, seed)
        assert len(game.state.boxes) == len(game.targets) == options.get("boxes", 1)
        assert game.state.boxes != game.targets and game.state.player not in game.state.boxes
        assert {game.state.player, *game.state.boxes, *game.targets} <= game.floor
        moves = game.solve()
        assert moves
        for move in moves:
            observation = game.step(Answer(game.write_move(move)))
        assert observation.done and observation.fields["success"] == 1.0
        pushed_on = round(observation.reward - 10.9, 9)
        assert pushed_on == 0.0


def test_a_bordered_room_has_walls_all_around() -> None:
    game = Sokoban(rows=2, columns=3, walls=0.0)
    lines = text_of(game.reset(PROMPT, 1)).splitlines()[-4:]
    assert lines[0] == lines[3] == "#####" and {line[0] + line[-1] for line in lines} == {"##"}
    assert Counter("".join(lines))["#"] == 14


def test_frozen_lake_moves_as_gymnasium_does() -> None:
    reason = "gymnasium is not installed: pip install gymnasium"
    gymnasium = pytest.importorskip("gymnasium", reason=reason)
    order = ["Left", "Down", "Right", "Up"]  # gymnasium's actions
    for seed in range(20):
        for slippery in (False, True):
            lake = FrozenLake(size=4, slippery=slippery, encoding="compact")
            lake.reset(PROMPT, seed)
            names = {"P": "S", "_": "F", "O": "H", "G": "G"}
            rows = ["".join(names[symbol] for symbol in lake.board()[4 * y : 4 * y + 4]) for y in range(4)]
            peer = gymnasium.make("FrozenLake-v1", desc=rows, is_slippery=slippery).unwrapped
            for state, actions in peer.P.items():
                cell = divmod(state, 4)
                if cell == lake.goal or cell in lake.holes:
                    continue
                for action, outcomes in actions.items():
                    expected: Counter[Any] = Counter()
                    for probability, after, reward, is_done in outcomes:
                        expected[divmod(int(after), 4), float(reward), bool(is_done)] += round(3 * probability)
                    assert transitions(lake, cell, order[action]) == expected, (seed, cell, order[action])


def transitions(lake: FrozenLake, cell: tuple[int, int], move: str) -> Counter[Any]:
    """Where a move ends, with reward and end, in thirds of probability."""
    found: Counter[Any] = Counter()
    for third in range(3):
        lake.player, lake.is_won = cell, False
        lake._draws = Chosen(third)
        reward, is_done, _ = lake.play(lake.write_move(move))
        found[lake.player, reward, is_done] += 1
    return found


class Chosen(random.Random):
    """A generator whose choice is the element of a number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def choice(self, seq: Any) -> Any:
        return seq[self.number]


def test_slippery_ice_slides_to_all_three_sides() -> None:
    lake = FrozenLake(size=3, ice=1.0, slippery=True, encoding="compact", max_steps=10**6)
    lake.reset(PROMPT, 0)
    lake.goal, ends = (2, 2), Counter[Any]()
    for _ in range(3000):
        lake.player = (1, 1)
        lake.play("u")
        ends[lake.player] += 1
    assert set(ends) == {(0, 1), (1, 0), (1, 2)} and all(900 < count < 1100 for count in ends.values())


def test_number_game_by_hand() -> None:
    game = NumberGame(rounds=4, encoding="words")
    game.reset(PROMPT, 0)
    rewards, texts = list[float](), list[str]()
    for cards, lamp, answer in (
        ([3, 5, 9], "green", "I take select(2)"),
        ([3, 5, 9], "red", "select(1)"),
        ([3, 9, 5], "yellow", "select(0), no: select( 2 )"),
        ([3, 9, 5], "red", "select(3)"),
    ):
        game.cards, game.lamp = cards, lamp
        last = game.step(Answer(answer))
        rewards.append(last.reward)
        texts.append(text_of(last))
    assert rewards == [0.25, 0.0, 0.25, -0.125]
    how = "answer with select(0), select(1) or select(2)"
    for text, said in zip(
        texts,
        ("Right: the card", "Wrong: the card", "Right: the card", f"That is no card: {how}. The card"),
        strict=True,
    ):
        assert said in text
    assert "The card was 3." in texts[-1]
    assert last.done and last.fields == {"success": 0.0, "right": 0.5, "score": 100.0}


def test_tree_game_by_hand() -> None:
    game = TreeGame(chops=3, encoding="words", format_penalty=0.3)
    game.reset(PROMPT, 0)
    game.start = game.power = 20_000
    game.equipment, game.attainable = [(900, -100, 200), (100, 100, -200), (300, -400, -900)], 2.0

    def play(answer: str) -> tuple[float, str, bool]:
        observation = game.step(Answer(answer))
        return round(observation.reward, 9), game.board().partition("Power: ")[2], observation.done

    assert play("<action>replace()</action>") == (-0.1, "20000. Screen: tree_cutting.", False)
    assert play("<action>click(10, 10)</action>") == (-0.1, "20000. Screen: tree_cutting.", False)
    dialog = "20000. Screen: equipment_selection. Equipment: attack +900, health -100, defence +200."
    assert play("click(400, 1100)") == (0.0, dialog, False)
    assert play("<action>click(360, 1067)</action>") == (-0.1, dialog, False)
    assert play("<action>equip()</action>") == (1.0, "21000. Screen: tree_cutting.", False)  # (1 + min(1, 1)) / 2
    play(game.best())
    assert game.best() == "<action>decompose()</action>"  # no change: nothing is won
    assert play("replace()") == (0.0, "21000. Screen: tree_cutting.", False)
    play(game.best())
    assert play("<action>replace()</action>") == (-1.0, "20000. Screen: tree_cutting.", True)  # (-1 + max(-1, -1)) / 2
    assert game.numbers() == {"success": 0.0, "right": 1 / 3, "gain": 0.0}


def test_the_compact_tree_game() -> None:
    game = TreeGame(encoding="compact", chops=2)
    assert text_of(game.reset(PROMPT, 4)) == "T>"
    game.equipment[0], key = (900, -100, -300), game.state_key()
    assert text_of(game.step(Answer("c"))) == "9ac>" and game.state_key() != key
    assert game.choices() == ["c", "r", "d"] and game.best() == "r"
    game.step(Answer("r"))
    assert game.power == game.start + 500 and game.state_key() == f"{game.start} 1 tree_cutting"
    total = [0.0, 0.0]
    for place, replaces in enumerate(("rd", "d")):
        game.reset(PROMPT, 4)
        while not game._is_over:
            total[place] += game.step(Answer(game.best() if place == 0 or not game.is_choosing else replaces)).reward
    assert total == [pytest.approx(1.0), 0.0]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(1+2)*3", (Fraction(9), [1, 2, 3])),
        (" 1/3 - 2 ", (Fraction(-5, 3), [1, 3, 2])),
        ("1/(2-2)", None),
        ("2**3", None),
        ("-(3)", None),
        ("1.5+2", None),
        ("True+1", None),
        ("x", None),
        ("", None),
        ("(" * 200, None),
        ("1+" * 149 + "1", (Fraction(150), [1] * 150)),
        ("1" * 301, None),
        ("__import__('os')", None),
    ],
)
def test_expressions_are_exact(expression: str, value: Any) -> None:
    found = evaluate(expression)
    assert (
        found == value
        if value is None
        else found is not None
        and (found[0], sorted(found[1]))
        == (
            value[0],
            sorted(value[1]),
        )
    )


def test_countdown_by_hand() -> None:
    game = Countdown(numbers=3)
    game.reset(PROMPT, 0)
    game.given, game.target = [2, 3, 7], 13
    assert game.step(Answer("<answer>2*3</answer>")).reward == -0.1  # without the 7
    wrong = game.step(Answer("<answer>7/3*2</answer>"))
    assert wrong.reward == 0.0 and text_of(wrong).startswith("That is 14/3, not 13.")
    right = game.step(Answer("first <answer>1</answer>, then <answer>2 * 3 + 7</answer>"))
    assert (right.reward, right.done, right.fields["success"]) == (1.0, True, 1.0)


def test_options_are_checked() -> None:
    with raises(ConfigError, "environment.options.boxes", found=9, expected=re.compile("rows=4 x columns=4")):
        Sokoban(boxes=9)
    with raises(ConfigError, "environment.options.size", found=1, expected=re.compile("2")):
        FrozenLake(size=1)
    with raises(ConfigError, "environment.options.numbers", found=9, expected=re.compile("2 to 8")):
        Countdown(numbers=9)
    with raises(ConfigError, "environment.options.walls", found=1.0, expected=re.compile("boxes=1 .*2000")):
        Sokoban(walls=1.0).reset(PROMPT, 0)
    entry = ENVIRONMENTS["whet_environments.sokoban:Sokoban"]
    assert entry.marks["pure"] and entry.name == "sokoban"
    with raises(ConfigError, "environment.options.rows", found=0, expected=re.compile("whole .*> 0$")):
        entry.resolve_options({"rows": 0}, "environment.options")
    with raises(ConfigError, "environment.options.row", found=3, change=re.compile("'rows'")):
        entry.resolve_options({"row": 3}, "environment.options")
    with raises(ConfigError, "environment.options.encoding", found="short", expected=re.compile("compact, words")):
        entry.resolve_options({"encoding": "short"}, "environment.options")
