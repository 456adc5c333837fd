# SPDX-License-Identifier: Apache-2.0
"""Screens of the games, values read from them, actions, and rewards worked by hand."""

from __future__ import annotations

import pytest
from whet_environments import rewards
from whet_environments.actions import Action, parse_action, write_action
from whet_environments.devices import layout as at
from whet_environments.devices.digits import BLOCKS, draw_number, read_number
from whet_environments.devices.drawn import DrawnNumberGame, DrawnTreeGame, PageRandom
from whet_environments.devices.reading import open_image, read_number_game, read_power, read_tree_game

image_module = pytest.importorskip("PIL.Image", reason="needs Pillow: pip install pillow")
draw_module = pytest.importorskip("PIL.ImageDraw", reason="needs Pillow: pip install pillow")

SIZES = [(720, 1280), (1080, 2400), (540, 960)]


def test_a_seed_draws_the_cards_of_the_page() -> None:
    """The numbers equal `generator(7)` in screen.js."""
    draws = PageRandom(7)
    assert [draws.random() * 2**32 for _ in range(3)] == [50271532, 266108690, 4195786334]
    game = DrawnNumberGame(7).game
    assert (game.cards, game.lamp) == ([1, 2, 9], "green")


def test_numbers_are_read_as_they_are_drawn() -> None:
    image = image_module.new("RGB", (720, 1280), at.PAPER)
    draw = draw_module.Draw(image)
    draw_number(draw, "".join(BLOCKS)[:7], (20, 300), 40, at.INK)
    draw_number(draw, "".join(BLOCKS)[7:], (20, 400), 40, at.INK)
    for size in SIZES:
        scaled = image.resize(size)
        read = [read_number(scaled, (20, y), 40, at.INK) for y in (300, 400)]
        assert read == ["".join(BLOCKS)[:7], "".join(BLOCKS)[7:]]
    assert read_number(image, (24, 300), 40, at.INK) is None  # half a block beside it
    assert read_number(image, (20, 600), 40, at.INK) is None
    assert read_number(image_module.new("RGB", (720, 1280), at.INK), (20, 300), 40, at.INK) is None


@pytest.mark.parametrize("size", SIZES)
def test_the_number_game_is_read_from_its_pixels(size: tuple[int, int]) -> None:
    screen = DrawnNumberGame(seed=7, rounds=3)
    for number in range(1, 4):
        place = number % 3
        state = read_number_game(open_image(screen.png()).resize(size))
        assert state is not None and (state.round, state.rounds, state.taken) == (number, 3, None)
        assert (list(state.cards), state.lamp, state.score) == (screen.game.cards, screen.game.lamp, screen.score)
        assert state.cards[state.right_place] == screen.game.right_card
        screen.tap(at.CARDS_X[place], at.CARDS_Y)
        after = read_number_game(open_image(screen.png()).resize(size))
        assert after is not None and (after.taken, after.is_right) == (place, place == state.right_place)
        assert after.score == state.score + (10 if after.is_right else -10) == screen.score
        screen.tap(*at.NEXT)
    over = read_number_game(open_image(screen.png()).resize(size))
    assert over is not None and over.is_over and over.score == screen.score


def test_the_tree_game_is_read_from_its_pixels() -> None:
    screen = DrawnTreeGame(seed=7, rounds=3)
    power = screen.game.power
    for number in range(1, 4):
        screen.tap(*at.REPLACE)  # there is no dialog: no change
        state = read_tree_game(open_image(screen.png()))
        assert state is not None and (state.screen, state.power, state.number) == ("tree_cutting", power, number)
        screen.tap(*at.AXE)
        state = read_tree_game(open_image(screen.png()))
        assert state is not None and state.screen == "equipment_selection" and state.changes == screen.game.changes
        assert state.words() == screen.game.board()
        replaces = number != 2
        power += state.change if replaces else 0
        screen.tap(*(at.REPLACE if replaces else at.DECOMPOSE))
    state = read_tree_game(open_image(screen.png()))
    assert state is not None and (state.screen, state.power) == ("over", power)
    screen.tap(*at.AXE)
    assert not screen.game.is_choosing


def test_one_game_is_not_read_as_the_other() -> None:
    assert read_tree_game(open_image(DrawnNumberGame(0).png())) is None
    assert read_number_game(open_image(DrawnTreeGame(0).png())) is None
    blank = image_module.new("RGB", (720, 1280), "white")
    assert read_tree_game(blank) is None and read_number_game(blank) is None


def test_a_url_begins_another_game() -> None:
    screen = DrawnNumberGame(1)
    screen.tap(at.CARDS_X[0], at.CARDS_Y)
    screen.open("http://127.0.0.1:1/number_game.html?seed=2&rounds=4")
    assert (screen.game.cards, screen.game.rounds, screen.taken) == (DrawnNumberGame(2).game.cards, 4, None)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<action>click(360, 1067)</action>", Action("click", (360, 1067))),
        ("<action>equip()</action>", Action("replace")),
        ("<ACTION>\nskip( )\n</ACTION>", Action("decompose")),
        ("replace() no, decompose()", Action("decompose")),
        ("<action>replace()</action> and select(1)", Action("replace")),
        ("<action>click(1)</action>", None),
        ("<action>replace(1)</action>", None),
        ("<action></action> select(1)", None),
        ("click(-1, 5)", None),
        ("click(99999, 5)", None),
        ("unselect", None),
        ("", None),
    ],
)
def test_actions(text: str, action: Action | None) -> None:
    assert parse_action(text) == action
    assert action is None or parse_action(write_action(action), needs_tag=True) == action


def test_rewards_of_the_number_game_by_hand() -> None:
    def score(text: str, lamp: str, number: int) -> float:
        state = {"cards": [5, 3, 8], "lamp": lamp, "round": number}
        return rewards.number_game(text, {"state": state})["score"]

    right = "<action>select(2)</action>"
    assert score(right, "green", 5) == score(right, "max", 9) == 1.0
    assert score(right, "red", 5) == score(right, "yellow", 5) == -1.0
    assert score("<action>select(1)</action>", "red", 1) == score("<action>select(0)</action>", "mid", 1) == 1.0
    assert score(right, "green", 10) == 3.0 and score(right, "red", 11) == 1.0
    assert score("the largest", "green", 5) == score("select(2)", "green", 5) == -0.5
    assert score("<action>select(3)</action>", "green", 5) == -0.5
    state = {"cards": [5, 3, 8], "lamp": "green", "round": 10}
    assert [
        rewards.number_game_binary(text, {"state": state}) for text in (right, "<action>select(0)</action>", "")
    ] == [
        1.0,
        0.0,
        0.0,
    ]
    with pytest.raises(ValueError, match=r"cards=\[5\].* lamp='blue'"):
        rewards.number_game(right, {"state": {"cards": [5], "lamp": "blue"}})


def test_rewards_of_the_tree_game_by_hand() -> None:
    def score(text: str, step: int, power: int | None = 10_000, change: int = 150) -> float:
        after = None if power is None else {"click": power, "replace": power + change, "decompose": power}
        return rewards.tree_game(text, {"state": {"power": power, "step": step, "after": after}})["score"]

    assert score("<action>equip()</action>", 5) == pytest.approx(1.15 + 0.2)
    assert score("<action>replace()</action>", 16, change=2500) == pytest.approx(2.0 + 2.0)
    assert score("<action>replace()</action>", 5, change=-50) == pytest.approx(-1.05 + 0.2)
    assert score("<action>replace()</action>", 5, change=-5000) == pytest.approx(-2.0 + 0.2)
    assert score("<action>skip()</action>", 5) == pytest.approx(0.2)
    assert score("I would put it on", 5) == pytest.approx(-0.5 + 0.2)
    assert score("<action>select(1)</action>", 5) == pytest.approx(-0.5 + 0.2)
    assert score("<action>click(1, 2)</action>", 10) == pytest.approx(2.2)
    assert score("<action>skip()</action>", 30) == pytest.approx(2.0 - 0.1)
    assert score("<action>skip()</action>", 5, power=None) == pytest.approx(-0.2 + 0.2)
    assert [rewards.efficiency(step) for step in (0, 15, 20, 25)] == pytest.approx([0.0, 0.2, 0.0, -0.05])
    assert rewards.power_reward(-1, 5) == rewards.power_reward(5, None) == -0.2


def test_the_power_in_lines_of_text() -> None:
    assert read_power(["金币 99999", "妖力: 77925", "攻击 +50"]) == 77925
    assert read_power(["战斗力 1,250 (3)", "5000"]) == 1250
    assert read_power(["12", "345 67"]) == 345
    assert read_power(["no number"]) is None and read_power([]) is None
