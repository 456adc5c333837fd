# SPDX-License-Identifier: Apache-2.0
"""Tools that return images, and the closer look at a part of one."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from whet.config.schema import EnvironmentConfig
from whet.data.media import image, images
from whet.environments.protocol import Answer, Observation
from whet.environments.running import EnvironmentSpec
from whet.plugins.agents.tools.toolbox import toolbox_of
from whet.plugins.agents.tools.zoom import Zoom
from whet.types import Media, MediaTokens, Message, Prompt

QUARTERS = {(0, 0): (255, 0, 0), (1, 0): (0, 255, 0), (0, 1): (0, 0, 255), (1, 1): (255, 255, 0)}


def picture() -> Media:
    """80 x 40 pixels, each quarter of one colour."""
    found = Image.new("RGB", (80, 40))
    for (x, y), colour in QUARTERS.items():
        found.paste(colour, (40 * x, 20 * y, 40 * x + 40, 20 * y + 20))
    return image(found)


def prompt(*media: Media) -> Prompt:
    return Prompt("0:0", 0, (Message("user", "?"),), (1,), "test", None, media=media)


def only_colour(found: Image.Image) -> Any:
    [(_, colour)] = found.getcolors() or []
    return colour


@pytest.mark.parametrize(
    ("unit", "box", "quarter"),
    [
        ("pixels", [0, 0, 40, 20], (0, 0)),
        ("pixels", [40, 20, 80, 40], (1, 1)),
        ("pixels", [45, -9, 800, 15], (1, 0)),  # what is outside is left out
        ("thousandths", [0, 500, 500, 1000], (0, 1)),
        ("resized", [20, 0, 40, 10], (1, 0)),  # the model reads it in 40 x 20 pixels
    ],
)
def test_the_part_is_that_of_the_box(unit: Any, box: list[float], quarter: tuple[int, int]) -> None:
    tokens = MediaTokens("<i>", (("<i>", 1),), 0, ((1, 1, 1),), size=(20, 40))
    media = picture()
    measured = Media(media.kind, media.digest, media.source, tokens=tokens)
    found = Zoom(prompt(measured), unit=unit).zoom(box)
    assert only_colour(found) == QUARTERS[quarter]
    assert found.size == ((80, 40) if box[1] >= 0 else (70, 30))  # twice as large


def test_without_a_size_of_the_model_boxes_are_in_pixels_of_the_image() -> None:
    assert Zoom(prompt(picture()), scale=0.5).zoom([0, 0, 40, 20]).size == (20, 10)


@pytest.mark.parametrize(
    ("box", "number", "message"),
    [
        ([0, 0, 40], 1, r"box .*\b3\b.*x1.*y2"),
        ([0, 0, float("nan"), 9], 1, r"box .*x1.*y2"),
        ([40, 20, 0, 0], 1, r"-40 x -20 .*\b8\b.*\b80 x 40"),
        ([0, 0, 40, 7], 1, r"\b40 x 7 .*\b8\b"),
        ([0, 0, 40, 20], 2, r"image .*\b2\b.*\b1\b"),
        ([0, 0, 40, 20], 0, r"image .*\b0\b"),
    ],
)
def test_a_wrong_box_is_an_error_for_the_model(box: list[float], number: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Zoom(prompt(picture())).zoom(box, number)


def answered(entry: Any, role: Any, *calls: dict[str, Any]) -> Observation:
    """The observation after a turn with calls."""
    tools = toolbox_of(EnvironmentConfig(tools=[entry], tool_role=role))
    task = prompt(picture())
    made = tools.around(EnvironmentSpec("single_turn", {})).load()(task)

    async def play() -> Observation:
        await made.reset(task, 0)
        named = tuple({"id": f"c{n}", "name": "zoom", "arguments": call} for n, call in enumerate(calls))
        observation: Observation = await made.step(Answer("", named))
        await made.close()
        return observation

    return asyncio.run(play())


def test_earlier_results_and_observations_are_zoomed_too() -> None:
    tools = toolbox_of(EnvironmentConfig(tools=["zoom"]))
    task = prompt(picture())
    made = tools.around(EnvironmentSpec("single_turn", {})).load()(task)
    tokens = MediaTokens("<i>", (("<i>", 1),), 0, ((1, 1, 1),), size=(20, 40))

    async def play() -> list[Any]:
        seen, colours = [*task.media], []
        await made.reset(task, 0)
        for call in (
            {"box": [40, 0, 80, 40]},
            {"box": [0, 10, 40, 20], "image": 2},
            {"box": [0, 0, 40, 20], "image": 3},
        ):
            turn = Answer("", ({"id": "c", "name": "zoom", "arguments": call},), media=tuple(seen))
            [shown] = (await made.step(turn)).media
            colours.append(images(shown)[0].resize((1, 2), Image.Resampling.NEAREST))
            seen.append(replace(shown, tokens=tokens))
        await made.close()
        return [[each.getpixel((0, row)) for row in (0, 1)] for each in colours]

    right, below = [(0, 255, 0), (255, 255, 0)], [(255, 255, 0)] * 2
    assert asyncio.run(play()) == [right, below, below]


LEFT, RIGHT, WRONG = {"box": [0, 0, 40, 20]}, {"box": [40, 0, 80, 20], "image": 1}, {"box": [0, 0, 40, 20], "image": 3}


def test_an_image_is_a_part_of_the_result() -> None:
    found = answered("zoom", "tool", LEFT, WRONG, RIGHT)
    assert [message.role for message in found.messages] == ["tool"] * 3
    assert [message.fields["tool_call_id"] for message in found.messages] == ["c0", "c1", "c2"]
    assert found.messages[0].content == found.messages[2].content == [{"type": "image"}]
    assert re.fullmatch(r"error: ValueError: .*\b3\b.*\b1\b.*", str(found.messages[1].content))
    assert [only_colour(images(media)[0]) for media in found.media] == [(255, 0, 0), (0, 255, 0)]
    assert (found.fields["tools/calls"], found.fields["tools/errors"]) == (3, 1)


def test_in_a_user_message_images_are_between_the_marks() -> None:
    found = answered("zoom", "user", LEFT, RIGHT)
    [message] = found.messages
    text = [{"type": "text", "text": each} for each in ("<tool_response>\n", "\n</tool_response>")]
    again = {"type": "text", "text": "\n<tool_response>\n"}
    assert message.content == [text[0], {"type": "image"}, text[1], again, {"type": "image"}, text[1]]
    assert len(found.media) == 2
    [message] = answered("zoom", "user", WRONG, WRONG).messages
    error = r"<tool_response>\nerror: ValueError: .*\b3\b.*\b1\b.*\n</tool_response>"
    assert re.fullmatch(f"{error}\n{error}", str(message.content))


def test_a_result_of_texts_and_images(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "from PIL import Image\n"
        "from whet.data.media import image\n"
        "def zoom(box: list[float]):\n"
        '    """Shows."""\n'
        "    seen = Image.new('RGB', (9, 9))\n"
        "    return ['before', seen, image(seen), {'a': 1}]\n"
    )
    found = answered(f"{tmp_path}/mine.py:zoom", "tool", LEFT)
    parts: Any = found.messages[0].content
    assert [part.get("text", part["type"]) for part in parts] == ["before", "image", "image", '{"a": 1}']
    assert len(found.media) == 2 and found.media[0] == found.media[1]
