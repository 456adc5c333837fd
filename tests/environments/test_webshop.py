# SPDX-License-Identifier: Apache-2.0
"""The shop of examples/environments."""

from __future__ import annotations

from dataclasses import replace

import pytest
from whet_environments.webshop.catalogue import Goal, Product
from whet_environments.webshop.environment import WebShop
from whet_environments.webshop.reward import purchase_reward, type_reward

from whet.environments.check import Plan, check
from whet.environments.protocol import Answer
from whet.types import Message, Prompt

PROMPT = Prompt("0:0", 0, (Message("user", ">"),), (1,), "test", None)
LAMP = Product(
    "b1",
    "Albor solid wood lamp for office",
    ("home", "lighting", "lamp"),
    ("solid wood", "easy clean"),
    {"color": ("black", "white"), "style": ("modern", "rustic")},
    35.0,
    "A lamp.",
    (),
    "",
)
GOAL = Goal(LAMP, ("solid wood",), {"color": "black", "style": "modern"}, 50.0)
CHOSEN = {"color": "black", "style": "modern"}


def shop() -> WebShop:
    return WebShop(num_products=200, format_penalty=0.25)


def play(game: WebShop, text: str) -> float:
    return game.step(Answer(text)).reward


def test_reward_by_hand() -> None:
    # 1 attribute, 2 options, 1 price: four parts
    assert purchase_reward(LAMP, GOAL, CHOSEN) == 1.0
    assert purchase_reward(LAMP, GOAL, {"color": "black"}) == 0.75
    assert purchase_reward(LAMP, GOAL, {"color": "white", "style": "modern"}) == 0.75
    assert purchase_reward(replace(LAMP, price=50.01), GOAL, CHOSEN) == 0.75
    assert purchase_reward(replace(LAMP, price=60.0), GOAL, {"color": "black"}) == 0.5
    tea = replace(LAMP, title="Albor tea for travel", category=("grocery", "drinks", "tea"))
    assert type_reward(tea, LAMP) == 0.0  # neither lamp nor office
    assert purchase_reward(tea, GOAL, CHOSEN) == 0.0


@pytest.mark.parametrize("seed", range(10))
def test_a_shopper_that_knows_the_goal_gets_1(seed: int) -> None:
    game = shop()
    seen = game.reset(PROMPT, seed)
    while not seen.done:
        assert not seen.truncated
        seen = game.step(Answer(game.best()))
    assert (seen.reward, seen.fields["success"]) == (1.0, 1.0)


def test_an_action_that_the_page_does_not_have_changes_nothing() -> None:
    game = shop()
    before = game.reset(PROMPT, 3).state_key
    for text in ("", "buy", "click[buy now]", "click[b000001]", "search[]"):
        assert play(game, text) == -0.25
        assert game.board() == before
    assert play(game, "I SEARCH[Lamp]") == 0.0
    assert "Page 1" in game.board()


def test_the_results_page_clears_the_options() -> None:
    game = shop()
    game.reset(PROMPT, 0)
    while "not chosen" not in game.board():
        play(game, game.best())
    fresh = game.board()
    play(game, game.best())
    assert game.board() != fresh
    play(game, "click[description]")
    assert game.goal.product.description in game.board()
    play(game, "click[< prev]")
    play(game, "click[< prev]")
    play(game, game.best())
    assert game.board() == fresh


def test_conformance() -> None:
    found = list(check("whet_environments.webshop.environment:WebShop", {"num_products": 100}, Plan(PROMPT)))
    assert [each for each in found if each.is_ok is False] == []
