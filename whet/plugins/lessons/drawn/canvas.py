# SPDX-License-Identifier: Apache-2.0
"""Draws figures on a white canvas, writes PNG files, and keeps pictures of the split train out of other splits."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Iterator

from PIL import Image, ImageDraw

from whet.data.sources import DataRow
from whet.errors import DataError
from whet.keyed import key

Colour = tuple[int, int, int]
WHITE: Colour = (255, 255, 255)
COLOURS: dict[str, Colour] = {
    "red": (220, 30, 30),
    "green": (30, 180, 40),
    "blue": (40, 60, 220),
    "yellow": (230, 220, 40),
}
SHAPES = ("circle", "square", "triangle")
NUM_TRAINED, NUM_HELD_OUT = 4096, 256  # rows, by default
MOST_DRAWS = 64  # attempts to draw a row of the split; on average one row in four is held out


def draw_rows(split: str, seed: int, count: int | None, draw: Callable[[random.Random], DataRow]) -> Iterator[DataRow]:
    """Yields `count` rows (default: 4096 for the split train, 256 for others). `draw` makes a row from a random
    generator.

    The digest of a row's pictures decides whether it belongs to train or to the other splits, so that no other split
    has the pictures of a train row, whatever the seeds.  Raises: DataError if too few rows belong to the split."""
    is_train = split == "train"
    draws = random.Random(key(seed, "drawn rows", split))
    for number in range(count or (NUM_TRAINED if is_train else NUM_HELD_OUT)):
        for _ in range(MOST_DRAWS):
            row = draw(draws)
            if is_train != _is_held_out(row):
                yield row
                break
        else:
            problem = f"{MOST_DRAWS} pictures in a row are not in the split {split}"
            change = "raise pixels or the number of figures"
            raise DataError(f"row {number}", problem, "more different pictures", change)


def _is_held_out(row: DataRow) -> bool:
    pictures = [*row.get("images", []), *(frame for video in row.get("videos", []) for frame in video)]
    return hashlib.sha256(b"".join(pictures)).digest()[0] < 64


def canvas(width: int, height: int | None = None) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Returns a white image, and the object that draws on it."""
    image = Image.new("RGB", (width, height or width), WHITE)
    return image, ImageDraw.Draw(image)


def draw_figure(draw: ImageDraw.ImageDraw, shape: str, colour: Colour, left: int, top: int, side: int) -> None:
    """Draws a circle, square or triangle that fills a square with `side` pixels."""
    box = (left, top, left + side - 1, top + side - 1)
    if shape == "circle":
        draw.ellipse(box, colour)
    elif shape == "square":
        draw.rectangle(box, colour)
    else:
        draw.polygon(((left + (side - 1) / 2, top), (box[0], box[3]), (box[2], box[3])), colour)


def to_png(image: Image.Image) -> bytes:
    """Encodes the image as a PNG file. Equal images give equal bytes."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def check_room(pixels: int, cells: int, smallest: int) -> None:
    """Checks that each of `cells` cells in a row has at least `smallest` pixels.  Raises: DataError."""
    if pixels < cells * smallest:
        expected = f"at least {smallest} pixels for each of {cells} figures in a row, not {pixels // cells}"
        raise DataError("pixels", pixels, expected, f"set it to {cells * smallest} or more")
