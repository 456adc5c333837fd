# SPDX-License-Identifier: Apache-2.0
"""Boards drawn as pictures, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from PIL.Image import Image

Tile = tuple[tuple[Literal["square", "circle", "ring"], str, float], ...]  # shapes with colour and share of the side
TILE = 16  # pixels of a cell: one token of a model with patches of 8 pixels, merged by 2
FLOOR = (250, 248, 240)
COLOURS = {
    "black": (30, 30, 30),
    "blue": (40, 60, 220),
    "brown": (170, 110, 40),
    "green": (30, 180, 40),
    "grey": (90, 90, 95),
    "ice": (200, 225, 245),
    "red": (220, 30, 30),
}


def draw_tiles(cells: Sequence[Sequence[str]], tiles: Mapping[str, Tile], tile: int) -> Image:
    """Draws each cell as the tile of its symbol, with `tile` pixels a side."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (tile * len(cells[0]), tile * len(cells)), FLOOR)
    draw = ImageDraw.Draw(image)
    for row, symbols in enumerate(cells):
        for column, symbol in enumerate(symbols):
            for shape, colour, share in tiles[symbol]:
                side = max(1, round(tile * share))
                left, top = column * tile + (tile - side) // 2, row * tile + (tile - side) // 2
                box = (left, top, left + side - 1, top + side - 1)
                if shape == "square":
                    draw.rectangle(box, COLOURS[colour])
                elif shape == "circle":
                    draw.ellipse(box, COLOURS[colour])
                else:
                    draw.ellipse(box, None, COLOURS[colour], max(1, tile // 8))
    return image
