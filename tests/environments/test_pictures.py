# SPDX-License-Identifier: Apache-2.0
"""Games whose observations are images: boards by tiles, screenshots of drawn and of real pages."""

from __future__ import annotations

import copy
import re
import shutil
from typing import Any

import pytest
from whet_environments.devices import layout as at
from whet_environments.devices.chromium import NAMES
from whet_environments.devices.errors import DeviceError
from whet_environments.devices.reading import read_number_game, read_tree_game
from whet_environments.frozen_lake import TILES as LAKE_TILES, FrozenLake
from whet_environments.number_game import NumberGame
from whet_environments.screen_games import NumberGameScreen, TreeGameScreen
from whet_environments.sokoban import TILES, Sokoban
from whet_environments.tiles import COLOURS, FLOOR, draw_tiles
from whet_environments.tree_game import TreeGame

from tests.raising import raises
from whet.data.media import images
from whet.environments.protocol import Answer, Observation, read_observation
from whet.types import Message, Prompt

PROMPT = Prompt("0:0", 0, (Message("user", ">"),), (1,), "test", None)


def image_of(observation: Observation) -> Any:
    """The only image, which the only message has a place for."""
    [media] = read_observation(observation).media
    [message] = observation.messages
    assert media.kind == "image" and isinstance(message.content, list)
    assert [part["type"] for part in message.content].count("image") == 1
    [image] = images(media)
    return image


def text_of(observation: Observation) -> str:
    return "".join(part.get("text", "") for part in observation.messages[0].content if isinstance(part, dict))


def test_a_tile_has_the_colours_of_its_shapes() -> None:
    rows = [["#", "_"], ["X", "O"], ["√", "S"]]
    image = draw_tiles(rows, TILES, 16)
    assert image.size == (32, 48)
    seen = [
        [{colour for _, colour in image.crop((x, y, x + 16, y + 16)).getcolors()} for x in (0, 16)] for y in (0, 16, 32)
    ]
    named = [
        [{COLOURS["grey"]}, {FLOOR}],
        [{FLOOR, COLOURS["brown"]}, {FLOOR, COLOURS["red"]}],
        [{FLOOR, COLOURS["green"]}, {FLOOR, COLOURS["blue"], COLOURS["red"]}],
    ]
    assert seen == named
    # A box is 12 of 16 pixels wide: 144 brown ones.
    assert {c: n for n, c in image.crop((0, 16, 16, 32)).getcolors()}[COLOURS["brown"]] == 144


@pytest.mark.parametrize("tiles", [TILES, LAKE_TILES])
def test_no_two_tiles_look_alike(tiles: Any) -> None:
    for tile in (8, 16):
        assert len({draw_tiles([[symbol]], tiles, tile).tobytes() for symbol in tiles}) == len(tiles)


@pytest.mark.parametrize("kind", [Sokoban, FrozenLake])
@pytest.mark.parametrize("encoding", ["compact", "words"])
def test_a_board_is_an_image_with_the_same_game(kind: type[Any], encoding: str) -> None:
    tiles = TILES if kind is Sokoban else LAKE_TILES
    for seed in range(5):
        seeing, reading = kind(render="picture", encoding=encoding, tile=8), kind(encoding=encoding)
        observation, plain = seeing.reset(PROMPT, seed), reading.reset(PROMPT, seed)
        while not plain.done:
            cells = reading._cells()
            expected = draw_tiles(cells, tiles, 8)
            assert image_of(observation).tobytes() == expected.tobytes()
            assert observation.state_key == plain.state_key
            assert reading.board() not in text_of(observation) or encoding == "compact"
            observation, plain = seeing.step(Answer(seeing.best())), reading.step(Answer(reading.best()))
            assert (observation.reward, observation.done) == (plain.reward, plain.done)
    assert "blue circle" in seeing.rules and "P is you" in reading.rules
    digests = {kind(render="picture").reset(PROMPT, seed).media[0].digest for seed in (1, 1, 2)}
    assert len(digests) == 2


@pytest.mark.slow
@pytest.mark.parametrize("device", ["drawn", "chromium"])
def test_the_number_game_on_a_screen(device: Any) -> None:
    if device == "chromium" and not any(map(shutil.which, NAMES)):
        pytest.skip("needs Chromium: apt-get install chromium")
    game = NumberGameScreen(rounds=3, width=360, device=device)
    try:
        observation = game.reset(PROMPT, 5)
        for place in ("", "nonsense", ""):
            image = image_of(observation)
            state = read_number_game(image)
            assert image.size == (360, 640) and state is not None
            assert (list(state.cards), state.lamp, state.score) == (game.cards, game.lamp, game.numbers()["score"])
            observation = game.step(Answer(place or f"<action>select({state.right_place})</action>"))
        assert observation.done and observation.fields == {"success": 0.0, "right": 2 / 3, "score": 110.0}
        assert "lamp" in text_of(observation) and "Cards:" not in text_of(observation)
        last = read_number_game(image_of(observation))
        assert last is not None and last.is_over and last.score == 110
    finally:
        game.close()
    game.close()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["drawn", "chromium"])
def test_the_tree_game_on_a_screen(device: Any) -> None:
    if device == "chromium" and not any(map(shutil.which, NAMES)):
        pytest.skip("needs Chromium: apt-get install chromium")
    game = TreeGameScreen(chops=3, device=device)
    try:
        observation = game.reset(PROMPT, 5)
        rewards = []
        while not observation.done:
            state = read_tree_game(image_of(observation))
            assert state is not None and state.power == game.power and state.right_action is not None
            action = state.right_action
            if action.name == "replace":  # the button in place of the name
                answer = f"click({at.REPLACE[0]}, {at.REPLACE[1] + 5})"
            else:
                answer = str(action)
            observation = game.step(Answer(f"<action>{answer}</action>"))
            rewards.append(observation.reward)
        assert sum(rewards) == pytest.approx(1.0) and observation.fields["success"] == 1.0
        assert read_tree_game(image_of(observation)).screen == "over"  # type: ignore[union-attr]
    finally:
        game.close()


def test_an_action_that_the_screen_does_not_have_changes_nothing() -> None:
    game = TreeGameScreen(chops=2)
    before = game.reset(PROMPT, 1)
    for answer in ("replace()", "click(3, 3)", "what"):
        observation = game.step(Answer(f"<action>{answer}</action>"))
        assert observation.reward == -0.25 and image_of(observation).tobytes() == image_of(before).tobytes()
    game.step(Answer(game.best()))
    observation = game.step(Answer("<action>click(360, 600)</action>"))  # in the dialog, on no button
    assert observation.reward == -0.25 and game.is_choosing


def test_a_screen_that_shows_another_game_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whet_environments.screen_games.SETTLE_SECONDS", 0.1)
    game = NumberGameScreen()
    game.reset(PROMPT, 1)
    game.tap(at.CARDS_X[0], at.CARDS_Y)
    game.tap(*at.NEXT)
    with raises(
        DeviceError, re.compile("drawn"), found=re.compile("^'Round 2 of 10"), expected=re.compile("^'Round 1 of 10")
    ):
        game.picture()


@pytest.mark.parametrize("kind", [NumberGameScreen, TreeGameScreen])
def test_a_copy_of_a_drawn_game_goes_on_alike(kind: type[Any]) -> None:
    game = kind()
    game.reset(PROMPT, 3)
    game.step(Answer(game.best()))
    copied = copy.deepcopy(game)
    for _ in range(3):
        answer = Answer(game.best())
        one, two = game.step(answer), copied.step(answer)
        assert (one.state_key, one.reward, image_of(one).tobytes()) == (
            two.state_key,
            two.reward,
            image_of(two).tobytes(),
        )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "plain"), [(NumberGameScreen, NumberGame), (TreeGameScreen, TreeGame)])
def test_answers_are_those_of_the_text_game(kind: type[Any], plain: type[Any]) -> None:
    for encoding in ("compact", "words"):
        game, written = kind(encoding=encoding), plain(encoding=encoding)
        assert game.reset(PROMPT, 3).state_key is not None and written.reset(PROMPT, 3).state_key is not None
        while not game.step(Answer(game.best())).done:
            pass
        assert game.is_won and len(game.choices()) == len(written.choices())
