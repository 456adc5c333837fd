# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
import re
from collections import Counter
from typing import Any

import pytest
from PIL import Image

from tests.raising import raises
from whet.errors import DataError
from whet.plugins.lessons.drawn.canvas import COLOURS, WHITE
from whet.plugins.lessons.drawn.figures import counting, grounding, naming, reading, two_images
from whet.plugins.scores.perception import detection, ocr


def opened(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png))


def islands(image: Image.Image) -> int:
    """Connected regions that are not white."""
    pixels: Any = image.load()
    left = {(x, y) for x in range(image.width) for y in range(image.height) if pixels[x, y] != WHITE}
    count = 0
    while left:
        count, waiting = count + 1, [left.pop()]
        while waiting:
            x, y = waiting.pop()
            near = {(x + a, y + b) for a in (-1, 0, 1) for b in (-1, 0, 1)} & left
            left -= near
            waiting += near
    return count


def boxes_by_colour(image: Image.Image) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, colour in COLOURS.items():
        mask = Image.new("L", image.size)
        mask.putdata([255 * (each == colour) for each in image.get_flattened_data()])
        if box := mask.getbbox():
            found[name] = box
    return found


def test_the_answer_is_the_number_of_figures() -> None:
    rows = list(counting("train", 0, num_rows=100))
    assert [islands(opened(row["images"][0])) for row in rows] == [int(row["answer"]) for row in rows]
    assert {row["answer"] for row in rows} == set("123456789")
    assert opened(rows[0]["images"][0]).size == (64, 64)
    small = list(counting("train", 0, num_rows=20, pixels=24, grid=2, most=4, prompt="<image>?"))
    assert [islands(opened(row["images"][0])) for row in small] == [int(row["answer"]) for row in small]


def test_two_pictures_are_compared_or_added() -> None:
    rows = list(two_images("train", 0, num_rows=60))
    numbers = [[islands(opened(png)) for png in row["images"]] for row in rows]
    assert [row["answer"] for row in rows] == ["1" if one > other else "2" for one, other in numbers]
    assert 20 < sum(row["answer"] == "1" for row in rows) < 40 and all(one != other for one, other in numbers)
    both = list(two_images("train", 0, num_rows=60, ask="both"))
    more = list(two_images("train", 0, num_rows=60, ask="difference"))
    assert [row["images"] for row in both] == [row["images"] for row in more] == [row["images"] for row in rows]
    assert [int(row["answer"]) for row in more] == [other - one for one, other in numbers]
    assert [int(row["answer"]) for row in both] == [one + other for one, other in numbers]
    assert "together" in both[0]["prompt"] and "more" in rows[0]["prompt"]


def test_the_answer_is_colour_and_shape() -> None:
    rows = list(naming("train", 0, num_rows=120))
    assert len({row["answer"] for row in rows}) == 12
    filled = {"square": 1.0, "circle": 0.785, "triangle": 0.5}
    for row in rows:
        image, (colour, shape) = opened(row["images"][0]), row["answer"].split()
        [(name, (left, top, right, low))] = boxes_by_colour(image).items()
        counts = Counter(image.get_flattened_data())
        assert name == colour and right - left == low - top and 16 <= right - left <= 24
        assert counts[COLOURS[colour]] / (right - left) ** 2 == pytest.approx(filled[shape], abs=0.06)


def test_the_answer_has_the_boxes_of_the_pixels() -> None:
    for row in grounding("train", 0, num_rows=40):
        found = {box["label"]: tuple(box["bbox_2d"]) for box in json.loads(row["answer"])}
        assert found == boxes_by_colour(opened(row["images"][0]))
        assert detection(f"<think>a</think>{row['answer']}", row["answer"])["reward"] == 1.0


def test_a_line_is_inside_of_its_picture() -> None:
    rows = list(reading("train", 0, num_rows=40))
    assert {len(row["answer"].split()) for row in rows} == {1, 2}
    for row in rows:
        image = opened(row["images"][0])
        left, top, right, low = image.convert("L").point(lambda value: 255 * (value < 200)).getbbox() or (0, 0, 0, 0)
        assert image.size == (128, 32) and 0 < left < right < 128 and 0 < top < low < 32
        # Twice as many letters are about twice as wide.
        assert (right - left > 50) == (" " in row["answer"])
        assert ocr(row["answer"], row["answer"], unit="character")["reward"] == 1.0


@pytest.mark.parametrize(
    ("options", "key", "found", "expected", "change"),
    [
        ({"most": 17}, "most", 17, "16 .*grid=4", "grid"),
        ({"pixels": 20}, "pixels", 20, " 8 .* 4 .* 5", " 32 "),
    ],
)
def test_figures_without_room_are_an_error(
    options: dict[str, int], key: str, found: int, expected: str, change: str
) -> None:
    with raises(DataError, key, found=found, expected=re.compile(expected), change=re.compile(change)):
        counting("train", 0, **options)
