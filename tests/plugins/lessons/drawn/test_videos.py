# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import itertools
import re

import pytest
from PIL import Image

from tests.raising import raises
from whet.errors import DataError
from whet.plugins.lessons.drawn.videos import WAYS, direction, flashes, jumps


def corners(frames: list[bytes]) -> list[tuple[int, int]]:
    """The left upper corner of the figure in each frame."""
    masks = [Image.open(io.BytesIO(each)).convert("L").point(lambda value: 255 * (value < 255)) for each in frames]
    return [(mask.getbbox() or (-1, -1))[:2] for mask in masks]  # type: ignore[misc]


@pytest.mark.parametrize("num_frames", [2, 4, 8])
def test_the_figure_moves_by_the_same_step(num_frames: int) -> None:
    rows = list(direction("train", 0, num_rows=60, num_frames=num_frames))
    assert {row["answer"] for row in rows} == set(WAYS)
    step = {2: 12, 4: 4, 8: 1}[num_frames]  # 3/8 of 32 pixels over all frames
    for row in rows:
        [frames] = row["videos"]
        found = corners(frames)
        moves = {(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(found)}
        right, down = WAYS[row["answer"]]
        assert len(frames) == num_frames and moves == {(step * right, step * down)}


@pytest.mark.parametrize("num_frames", [2, 4, 8])
def test_the_answer_is_the_number_of_jumps(num_frames: int) -> None:
    rows = list(jumps("train", 0, num_rows=60, num_frames=num_frames))
    assert {row["answer"] for row in rows} == {str(number) for number in range(num_frames)}
    for row in rows:
        found = corners(row["videos"][0])
        assert str(sum(a != b for a, b in itertools.pairwise(found))) == row["answer"]


@pytest.mark.parametrize("num_frames", [2, 8])
def test_the_answer_is_the_number_of_frames_with_a_figure(num_frames: int) -> None:
    rows = list(flashes("train", 0, num_rows=60, num_frames=num_frames))
    assert {row["answer"] for row in rows} == {str(number) for number in range(num_frames + 1)}
    for row in rows:
        [frames] = row["videos"]
        assert len(frames) == num_frames
        assert str(sum(corner != (-1, -1) for corner in corners(frames))) == row["answer"]


def test_a_video_without_room_is_an_error() -> None:
    with raises(DataError, key="pixels", found=12, expected=re.compile(" 1 ")):
        direction("train", 0, pixels=12)
