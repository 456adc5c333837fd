# SPDX-License-Identifier: Apache-2.0
"""Numbers of 3 x 5 blocks a digit, which a rule reads from the pixels of a screen of any size without errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from whet_environments.devices.layout import HEIGHT, WIDTH, Colour, Place

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

# Rows from above, three blocks each.
BLOCKS = {
    "0": "111101101101111",
    "1": "010110010010111",
    "2": "111001111100111",
    "3": "111001111001111",
    "4": "101101111001001",
    "5": "111100111001111",
    "6": "111100111101111",
    "7": "111001001001001",
    "8": "111101111101111",
    "9": "111101111001111",
    "+": "000010111010000",
    "-": "000000111000000",
    "/": "001001010100100",
}
SIGNS = {blocks: sign for sign, blocks in BLOCKS.items()}
NEAR = 40  # largest difference of a channel between a pixel and the colour that it counts as
MOST_SIGNS = 12


def draw_number(draw: ImageDraw, text: str, at: Place, height: float, colour: Colour) -> None:
    """Draws a text of digits and `+ - /` with its left upper corner at `at`."""
    size = height / 5
    for place, sign in enumerate(text):
        for number, block in enumerate(BLOCKS[sign]):
            left, top = at[0] + (4 * place + number % 3) * size, at[1] + number // 3 * size
            if block == "1":
                draw.rectangle((left, top, left + size - 1, top + size - 1), colour)


def centred(x: float, y: float, height: float) -> Place:
    """Returns the left upper corner of one digit with its centre at (x, y)."""
    return x - height / 5 * 1.5, y - height / 2


def pixel(image: Image, x: float, y: float) -> Colour:
    """Returns the colour at a place of the layout, in an image of any size."""
    width, height = image.size
    at = min(width - 1, int(x * width / WIDTH)), min(height - 1, int(y * height / HEIGHT))
    colour = image.getpixel(at)
    assert isinstance(colour, tuple)  # the mode is RGB
    red, green, blue = colour
    return red, green, blue


def is_near(found: Colour, colour: Colour) -> bool:
    """Tells whether a pixel counts as a colour."""
    return all(abs(a - b) <= NEAR for a, b in zip(found, colour, strict=True))


def read_number(image: Image, at: Place, height: float, colour: Colour | Callable[[Colour], bool]) -> str | None:
    """Reads the text that `draw_number` draws; None if the pixels are no such text. `image` has the mode RGB."""
    size, found = height / 5, ""
    is_set = colour if callable(colour) else lambda each: is_near(each, colour)
    for place in range(MOST_SIGNS):
        blocks = "".join(
            str(int(is_set(pixel(image, at[0] + (4 * place + n % 3 + 0.5) * size, at[1] + (n // 3 + 0.5) * size))))
            for n in range(15)
        )
        if "1" not in blocks:
            return found or None
        if blocks not in SIGNS:
            return None
        found += SIGNS[blocks]
    return None


def read_digit(image: Image, x: float, y: float, height: float, colour: Colour) -> int | None:
    """Reads one digit with its centre at (x, y)."""
    left, top = centred(x, y, height)
    size = height / 5
    blocks = "".join(
        str(int(is_near(pixel(image, left + (n % 3 + 0.5) * size, top + (n // 3 + 0.5) * size), colour)))
        for n in range(15)
    )
    sign = SIGNS.get(blocks, "")
    return int(sign) if sign.isdigit() else None
