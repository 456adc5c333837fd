# SPDX-License-Identifier: Apache-2.0
"""Questions about drawn pictures: count, name or compare figures, locate boxes, and read a line of words."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Literal

from PIL import Image, ImageFont

from whet.errors import DataError
from whet.options import Count
from whet.plugins.lessons.drawn.canvas import (
    COLOURS,
    SHAPES,
    DataRow,
    canvas,
    check_room,
    draw_figure,
    draw_rows,
    to_png,
)

SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]


def counting(
    split: str,
    seed: int,
    *,
    num_rows: Count | None = None,
    pixels: Count = 64,
    grid: Count = 4,
    most: Count = 9,
    prompt: str = "<image>How many figures are there? Answer with a number.",
) -> Iterator[DataRow]:
    """Yields rows with 1 to `most` circles and squares in four colours on a grid; the answer is their number.

    Raises: DataError if the figures do not fit."""
    _check_grid(pixels, grid, most)

    def draw(draws: random.Random) -> DataRow:
        number = draws.randint(1, most)
        return {"prompt": prompt, "images": [to_png(scatter(draws, number, pixels, grid))], "answer": str(number)}

    return draw_rows(split, seed, num_rows, draw)


def two_images(
    split: str,
    seed: int,
    *,
    num_rows: Count | None = None,
    pixels: Count = 48,
    grid: Count = 3,
    most: Count = 5,
    ask: Literal["more", "difference", "both"] = "more",
    prompt: str | None = None,
) -> Iterator[DataRow]:
    """Yields rows with two pictures of 1 to `most` figures, in different numbers. `ask` is the question: which picture
    has more (`1` or `2`), the difference (second minus first: `-2`), or the number in both together.

    Raises: DataError if the figures do not fit."""
    _check_grid(pixels, grid, most)
    questions = {
        "more": "<image><image>Which picture has more figures? Answer with 1 or 2.",
        "difference": "<image><image>How many more figures has the second picture? Answer with a number.",
        "both": "<image><image>How many figures do both pictures have together? Answer with a number.",
    }

    def draw(draws: random.Random) -> DataRow:
        numbers = draws.sample(range(1, most + 1), 2)
        images = [to_png(scatter(draws, number, pixels, grid)) for number in numbers]
        one, other = numbers
        answer = {"more": 1 + (other > one), "difference": other - one, "both": one + other}[ask]
        return {"prompt": prompt or questions[ask], "images": images, "answer": str(answer)}

    return draw_rows(split, seed, num_rows, draw)


def naming(
    split: str,
    seed: int,
    *,
    num_rows: Count | None = None,
    pixels: Count = 48,
    prompt: str = "<image>What is the colour and shape of the figure?",
) -> Iterator[DataRow]:
    """Yields rows with one figure; the answer is its colour and shape, such as `red circle`."""
    check_room(pixels, 1, 12)

    def draw(draws: random.Random) -> DataRow:
        image, drawing = canvas(pixels)
        colour, shape = draws.choice([*COLOURS]), draws.choice(SHAPES)
        side = draws.randint(pixels // 3, pixels // 2)
        draw_figure(drawing, shape, COLOURS[colour], *_place(draws, pixels, side), side)
        return {"prompt": prompt, "images": [to_png(image)], "answer": f"{colour} {shape}"}

    return draw_rows(split, seed, num_rows, draw)


def grounding(
    split: str,
    seed: int,
    *,
    num_rows: Count | None = None,
    pixels: Count = 96,
    most: Literal[1, 2, 3, 4] = 3,
    prompt: str = (
        '<image>Find all boxes. Answer with a JSON list of {"bbox_2d": [x1, y1, x2, y2], "label": "colour"} in pixels.'
    ),
) -> Iterator[DataRow]:
    """Yields rows with 1 to `most` separate coloured boxes; the answer is a list for the reward `detection`."""
    check_room(pixels, 3, 16)

    def draw(draws: random.Random) -> DataRow:
        (image, drawing), cell, found = canvas(pixels), pixels // 3, []
        number = draws.randint(1, most)
        for place, colour in zip(draws.sample(range(9), number), draws.sample([*COLOURS], number), strict=True):
            width, height = (draws.randint(cell // 2, cell - 2) for _ in range(2))
            left = place % 3 * cell + draws.randint(1, cell - 1 - width)
            top = place // 3 * cell + draws.randint(1, cell - 1 - height)
            drawing.rectangle((left, top, left + width - 1, top + height - 1), COLOURS[colour])
            found.append({"bbox_2d": [left, top, left + width, top + height], "label": colour})
        found.sort(key=lambda box: (box["bbox_2d"][1], box["bbox_2d"][0]))
        return {"prompt": prompt, "images": [to_png(image)], "answer": json.dumps(found)}

    return draw_rows(split, seed, num_rows, draw)


def reading(
    split: str,
    seed: int,
    *,
    num_rows: Count | None = None,
    pixels: Count = 128,
    most: Count = 2,
    prompt: str = "<image>Read the text.",
) -> Iterator[DataRow]:
    """Yields rows with a picture (4 times as wide as high) of 1 to `most` four-letter words; the reward is `ocr`."""
    check_room(pixels, most, 40)
    font = ImageFont.load_default(pixels / most / 4)

    def draw(draws: random.Random) -> DataRow:
        image, drawing = canvas(pixels, pixels // 4)
        text = " ".join("".join(draws.choices(SYLLABLES, k=2)) for _ in range(draws.randint(1, most)))
        drawing.text((draws.randint(2, 6), pixels // 8 + draws.randint(-2, 2)), text, (0, 0, 0), font, anchor="lm")
        return {"prompt": prompt, "images": [to_png(image)], "answer": text}

    return draw_rows(split, seed, num_rows, draw)


def scatter(draws: random.Random, number: int, pixels: int, grid: int) -> Image.Image:
    """Draws `number` circles and squares of random colours in random cells of a grid; the figures do not touch."""
    (image, drawing), cell = canvas(pixels), pixels // grid
    for place in draws.sample(range(grid * grid), number):
        left, top = (cell * line + draws.randint(1, 3) for line in (place % grid, place // grid))
        draw_figure(drawing, draws.choice(SHAPES[:2]), COLOURS[draws.choice([*COLOURS])], left, top, cell - 4)
    return image


def _place(draws: random.Random, pixels: int, side: int) -> tuple[int, int]:
    return draws.randint(0, pixels - side), draws.randint(0, pixels - side)


def _check_grid(pixels: int, grid: int, most: int) -> None:
    check_room(pixels, grid, 8)
    if most > grid * grid:
        raise DataError("most", most, f"at most the {grid * grid} cells of grid={grid}", "raise grid, or lower most")
