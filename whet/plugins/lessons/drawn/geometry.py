# SPDX-License-Identifier: Apache-2.0
"""Geometry questions with a drawn figure, in the row form of geometry3k: `images`, `problem`, `answer`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

from PIL import ImageDraw, ImageFont

from whet.errors import DataError
from whet.options import Count
from whet.plugins.lessons.drawn.canvas import DataRow, canvas, check_room, draw_rows, to_png

Point = tuple[float, float]
INK = (20, 20, 20)
TRIPLES = ((3, 4, 5), (5, 12, 13), (8, 15, 17), (7, 24, 25), (20, 21, 29), (9, 40, 41))


def questions(
    split: str,
    seed: int,
    *,
    num_rows: Count | None = None,
    pixels: Count = 224,
    kinds: Sequence[str] = ("triangle", "right_triangle", "rectangle", "inscribed_angle", "chord"),
) -> Iterator[DataRow]:
    """Yields rows that ask for an angle, a length or an area of a figure. Labels show the known sizes; the answer is a
    whole number. Each row has one of the figures `kinds`.

    Raises: DataError for an unknown kind."""
    check_room(pixels, 1, 112)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise DataError("kinds", f"has {unknown[0]!r}", f"some of {', '.join(KINDS)}", "correct it")
    if not kinds:
        raise DataError("kinds", "is empty", f"some of {', '.join(KINDS)}", "name one")

    def draw(draws: random.Random) -> DataRow:
        image, drawing = canvas(pixels)
        problem, answer = KINDS[draws.choice([*kinds])](draws, Sheet(drawing, pixels))
        return {"images": [to_png(image)], "problem": f"<image>{problem}", "answer": str(answer)}

    return draw_rows(split, seed, num_rows, draw)


class Sheet:
    """A square to draw on. Its upper left corner has the coordinates (0, 0), its lower right corner (1, 1)."""

    def __init__(self, drawing: ImageDraw.ImageDraw, pixels: int) -> None:
        self._drawing, self._pixels = drawing, pixels
        self._font = ImageFont.load_default(pixels / 14)

    def lines(self, *points: Point) -> None:
        """Draws lines from point to point."""
        self._drawing.line([self._at(point) for point in points], INK, max(1, self._pixels // 112))

    def circle(self, centre: Point, radius: float) -> None:
        """Draws a circle and its centre."""
        x, y = self._at(centre)
        for size, fill in ((radius * self._pixels, None), (self._pixels / 90, INK)):
            self._drawing.ellipse((x - size, y - size, x + size, y + size), fill, INK, max(1, self._pixels // 112))

    def label(self, text: str, at: Point) -> None:
        """Writes a label centred at a point."""
        self._drawing.text(self._at(at), text, INK, self._font, anchor="mm")

    def _at(self, point: Point) -> Point:
        return point[0] * self._pixels, point[1] * self._pixels


def triangle(draws: random.Random, sheet: Sheet) -> tuple[str, int]:
    """Draws a triangle to scale, labels two angles, and asks for the third."""
    first, second = draws.randint(30, 80), draws.randint(30, 80)
    third = 180 - first - second
    side = 0.76 * math.sin(math.radians(second)) / math.sin(math.radians(third))
    height = side * math.sin(math.radians(first))
    scale = min(1.0, 0.7 / height)
    left, right = (0.12, 0.85), (0.12 + 0.76 * scale, 0.85)
    top = (0.12 + side * scale * math.cos(math.radians(first)), 0.85 - height * scale)
    corners, labels = [left, right, top], [first, second, third]
    sheet.lines(*corners, left)
    asked = draws.randrange(3)
    for number, corner in enumerate(corners):
        sheet.label("x" if number == asked else f"{labels[number]}°", _towards(corner, corners, 0.3))
    return "Find x, in degrees.", labels[asked]


def right_triangle(draws: random.Random, sheet: Sheet) -> tuple[str, int]:
    """Draws a right triangle, labels two sides, and asks for the third."""
    sides = _triple(draws)
    corner, along, up = (0.2, 0.8), (0.85, 0.8), (0.2, 0.8 - 0.65 * min(1.0, max(0.4, sides[1] / sides[0])))
    sheet.lines(corner, along, up, corner)
    sheet.lines((0.2, 0.74), (0.26, 0.74), (0.26, 0.8))
    asked = draws.randrange(3)
    middles = [_middle(corner, along, (0, 0.07)), _middle(corner, up, (-0.1, 0)), _middle(along, up, (0.07, -0.07))]
    for number, place in enumerate(middles):
        sheet.label("x" if number == asked else str(sides[number]), place)
    return "Find x.", sides[asked]


def rectangle(draws: random.Random, sheet: Sheet) -> tuple[str, int]:
    """Draws a rectangle, and asks for its area, its perimeter, or a side given the area."""
    width, height = draws.randint(3, 20), draws.randint(3, 20)
    scale = 0.64 / max(width, height)
    right, low = 0.2 + scale * width, 0.15 + scale * height
    sheet.lines((0.2, 0.15), (right, 0.15), (right, low), (0.2, low), (0.2, 0.15))
    asked = draws.choice(["area", "perimeter", "side"])
    sheet.label(str(width), ((0.2 + right) / 2, low + 0.07))
    sheet.label("x" if asked == "side" else str(height), (0.1, (0.15 + low) / 2))
    if asked == "side":
        return f"The area of the rectangle is {width * height}. Find x.", height
    found = width * height if asked == "area" else 2 * (width + height)
    return f"Find the {asked} of the rectangle.", found


def inscribed_angle(draws: random.Random, sheet: Sheet) -> tuple[str, int]:
    """Draws two angles over the same arc, and asks for the inscribed angle from the central angle, or the reverse."""
    inscribed = draws.randint(25, 70)
    ends = [_on_circle(90 + inscribed), _on_circle(90 - inscribed)]
    top = _on_circle(270 + draws.randint(-30, 30))
    sheet.circle((0.5, 0.5), 0.4)
    sheet.lines(ends[0], top, ends[1])
    sheet.lines(ends[0], (0.5, 0.5), ends[1])
    is_central = draws.random() < 0.5
    sheet.label("x" if is_central else f"{2 * inscribed}°", (0.5, 0.6))
    sheet.label(f"{inscribed}°" if is_central else "x", _towards(top, [*ends, top], 0.25))
    return "Find x, in degrees.", 2 * inscribed if is_central else inscribed


def chord(draws: random.Random, sheet: Sheet) -> tuple[str, int]:
    """Draws a chord, and asks for its length from the radius and its distance to the centre."""
    distance, half, radius = _triple(draws)
    down, side = 0.4 * distance / radius, 0.4 * half / radius
    left, right, foot = (0.5 - side, 0.5 + down), (0.5 + side, 0.5 + down), (0.5, 0.5 + down)
    sheet.circle((0.5, 0.5), 0.4)
    sheet.lines(left, right, (0.5, 0.5), foot)
    sheet.label(str(radius), _middle((0.5, 0.5), right, (0.06, -0.05)))
    sheet.label(str(distance), _middle((0.5, 0.5), foot, (-0.07, 0)))
    sheet.label("x", _middle(left, right, (-0.1, 0.05)))
    return "The line from the centre to the chord is perpendicular to it. Find the length x of the chord.", 2 * half


KINDS: dict[str, Callable[[random.Random, Sheet], tuple[str, int]]] = {
    "triangle": triangle,
    "right_triangle": right_triangle,
    "rectangle": rectangle,
    "inscribed_angle": inscribed_angle,
    "chord": chord,
}


def _triple(draws: random.Random) -> tuple[int, int, int]:
    """Returns the two legs, in random order, and the hypotenuse of a right triangle with integer sides."""
    one, other, longest = draws.choice(TRIPLES)
    times = draws.randint(1, max(1, 60 // longest))
    legs = draws.sample([times * one, times * other], 2)
    return legs[0], legs[1], times * longest


def _on_circle(degrees: float) -> Point:
    return 0.5 + 0.4 * math.cos(math.radians(degrees)), 0.5 + 0.4 * math.sin(math.radians(degrees))


def _middle(one: Point, other: Point, moved: Point) -> Point:
    return (one[0] + other[0]) / 2 + moved[0], (one[1] + other[1]) / 2 + moved[1]


def _towards(corner: Point, corners: Sequence[Point], share: float) -> Point:
    """Returns the point at the fraction `share` of the way from a corner to the centroid of all corners."""
    middle = [sum(each[axis] for each in corners) / len(corners) for axis in (0, 1)]
    return corner[0] + share * (middle[0] - corner[0]), corner[1] + share * (middle[1] - corner[1])
