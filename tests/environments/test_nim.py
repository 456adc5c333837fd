# SPDX-License-Identifier: Apache-2.0
"""Nim, the game of two players of examples/environments."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from whet_environments.nim import Nim

from tests.raising import raises
from whet.environments.host import open_host
from whet.environments.protocol import Answer, Observation
from whet.errors import ConfigError
from whet.types import Message, Prompt

PROMPT = Prompt("0:0", 0, (Message("user", ">"),), (1,), "test", None)


def nim(heap: int, **options: Any) -> Nim:
    """A game that begins with a heap of this size."""
    game = Nim(encoding="compact", **options)
    game.reset(PROMPT, 0)
    game.heap = heap
    return game


def play(game: Nim, *answers: str) -> Observation:
    for answer in answers:
        observation = game.step(Answer(answer))
    return observation


def test_the_players_take_turns_and_who_takes_the_last_stone_wins() -> None:
    game = nim(6)
    after = play(game, "2")
    assert (after.player, after.is_trained, after.state_key) == ("second", True, "4") and not after.rewards
    assert play(game, "1").player == "first"
    end = play(game, "3")
    assert end.done and end.rewards == {"first": 1.0, "second": -1.0} and end.reward == 0.0
    # 6 and 3 are no multiples of 4, and both moves were right; 4 cannot be won
    assert end.fields == {"first_wins": 1.0, "right": 1.0}
    with pytest.raises(RuntimeError, match="after the end"):
        game.step(Answer("1"))


def test_a_wrong_move_and_one_that_is_not_in_the_game() -> None:
    end = play(nim(5), "2", "3")  # 1 was right
    assert end.rewards == {"first": -1.0, "second": 1.0} and end.fields == {"first_wins": 0.0, "right": 0.5}
    for answer in ("4", "0", "", "x", "12", "3 "):
        end = play(nim(9), "1", answer)
        assert end.done and end.rewards == {"first": 1.0, "second": -1.0}
    assert play(nim(2), "3").rewards == {"first": -1.0, "second": 1.0}  # more than there are


def test_one_learns() -> None:
    game = nim(9, learners="first")
    assert game.reset(PROMPT, 1).is_trained
    game.heap = 9
    assert not play(game, "1").is_trained
    assert play(game, "1").is_trained


def test_scripted_opponents() -> None:
    game = nim(7, opponent="perfect")
    assert play(game, "2").state_key == "4" and play(game, "1").state_key == "0"  # 5 - 1, 3 - 3
    assert game.numbers() == {"first_wins": 0.0, "right": 0.0}
    won = play(nim(3, opponent="random"), "3")
    assert won.done and won.reward == 1.0 and not won.rewards and won.player == ""
    lost = play(nim(4, opponent="perfect"), "1")
    assert lost.done and lost.reward == -1.0 and "right" not in lost.fields
    wins = 0.0
    for seed in range(50):
        game = Nim(opponent="random", encoding="words")
        observation = game.reset(PROMPT, seed)
        while not observation.done:
            observation = game.step(Answer(game.best()))
        wins += observation.fields["first_wins"]
    assert wins >= 45


def test_words() -> None:
    game = Nim(highest=8, most=2)
    text = str(game.reset(PROMPT, 3).messages[0].content)
    assert "takes 1 to 2 stones" in text and text.endswith(f"Stones: {game.heap}.")
    game.heap = 8
    assert play(game, "I first thought of take(1). take( 2 )").state_key == "Stones: 6."
    assert game.choices() == ["take(1)", "take(2)"] and game.best() == "take(1)"
    lost = play(game, "take(3)")
    assert lost.done and "\n\nThat is not in the game: it loses the game.\n\n" in str(lost.messages[0].content)


def test_the_seed_alone_decides() -> None:
    heaps = []
    for seed in range(40):
        game = Nim()
        random.seed(random.random())
        game.reset(PROMPT, seed)
        heaps.append(game.heap)
        game.reset(PROMPT, seed)
        assert game.heap == heaps[-1]
    assert min(heaps) >= 1 and max(heaps) <= 20 and len(set(heaps)) > 10


def test_sizes_that_have_no_character() -> None:
    with raises(ConfigError, "environment.options", found="highest=36, most=3", expected=re.compile("35 and 9")):
        Nim(highest=36)
    host = open_host("whet_environments.nim:Nim", {"highest": 40})
    refusal = host.refusal()
    assert type(refusal) is ConfigError and "highest=40" in str(refusal)
