# SPDX-License-Identifier: Apache-2.0
"""Questions about videos as lists of frames: a figure's direction, its jumps, and the frames that show a figure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Annotated

from annotated_types import Ge

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

Frames = Annotated[int, Ge(2)]
WAYS = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}


def direction(
    split: str,
    seed: int,
    *,
    num_rows: Count | None = None,
    pixels: Count = 32,
    num_frames: Frames = 4,
    prompt: str = "<video>Which way does the figure move? Answer with up, down, left or right.",
) -> Iterator[DataRow]:
    """Yields rows with a figure that moves by the same step in each frame; the answer is up, down, left or right."""
    side, step = pixels // 4, max(1, 3 * pixels // 8 // (num_frames - 1))
    check_room(pixels, 1, 16 + step * (num_frames - 1))

    def draw(draws: random.Random) -> DataRow:
        way, room = draws.choice([*WAYS]), pixels - side
        length = step * (num_frames - 1)
        across, start = draws.randint(0, room), draws.randint(0, room - length)
        right, down = WAYS[way]
        shown = [start + step * number for number in range(num_frames)][:: right + down]
        places = [(along, across) if right else (across, along) for along in shown]
        return _row(draws, prompt, places, pixels, side, way)

    return draw_rows(split, seed, num_rows, draw)


def jumps(
    split: str,
    seed: int,
    *,
    num_rows: Count | None = None,
    pixels: Count = 32,
    num_frames: Frames = 4,
    prompt: str = "<video>How often does the figure jump? Answer with a number.",
) -> Iterator[DataRow]:
    """Yields rows with a figure that changes its place between some frames; the answer is the number of changes."""
    check_room(pixels, 4, 8)
    cell = pixels // 4

    def draw(draws: random.Random) -> DataRow:
        number = draws.randint(0, num_frames - 1)
        jumping, places = draws.sample(range(1, num_frames), number), [draws.randrange(16)]
        for frame in range(1, num_frames):
            others = [place for place in range(16) if place != places[-1]]
            places.append(draws.choice(others) if frame in jumping else places[-1])
        corners = [(place % 4 * cell + 1, place // 4 * cell + 1) for place in places]
        return _row(draws, prompt, corners, pixels, cell - 2, str(number))

    return draw_rows(split, seed, num_rows, draw)


def flashes(
    split: str,
    seed: int,
    *,
    num_rows: Count | None = None,
    pixels: Count = 32,
    num_frames: Frames = 8,
    prompt: str = "<video>In how many frames is a figure? Answer with a number.",
) -> Iterator[DataRow]:
    """Yields rows with a new figure in some of the frames; the answer is the number of frames that show a figure."""
    check_room(pixels, 2, 8)
    side = pixels // 2 - 4

    def draw(draws: random.Random) -> DataRow:
        number, frames = draws.randint(0, num_frames), []
        shown = draws.sample(range(num_frames), number)
        for frame in range(num_frames):
            image, drawing = canvas(pixels)
            if frame in shown:
                left, top = (draws.randint(0, 1) * pixels // 2 + draws.randint(1, 3) for _ in range(2))
                draw_figure(drawing, draws.choice(SHAPES), COLOURS[draws.choice([*COLOURS])], left, top, side)
            frames.append(to_png(image))
        return {"prompt": prompt, "videos": [frames], "answer": str(number)}

    return draw_rows(split, seed, num_rows, draw)


def _row(
    draws: random.Random, prompt: str, places: list[tuple[int, int]], pixels: int, side: int, answer: str
) -> DataRow:
    shape, colour = draws.choice(SHAPES), COLOURS[draws.choice([*COLOURS])]
    frames = []
    for place in places:
        image, drawing = canvas(pixels)
        draw_figure(drawing, shape, colour, *place, side)
        frames.append(to_png(image))
    return {"prompt": prompt, "videos": [frames], "answer": answer}
