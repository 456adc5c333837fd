# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from tests.raising import raises
from whet.config.sources import Source
from whet.data.load import _call
from whet.errors import DataError
from whet.plugins.lessons.drawn import figures, geometry, videos
from whet.plugins.lessons.drawn.canvas import canvas, draw_figure, draw_rows, to_png

DATA_SETS: list[Callable[..., Any]] = [
    figures.counting,
    figures.two_images,
    figures.naming,
    figures.grounding,
    figures.reading,
    videos.direction,
    videos.jumps,
    videos.flashes,
    geometry.questions,
]


def pictures(row: dict[str, Any]) -> tuple[bytes, ...]:
    return (*row.get("images", []), *(frame for video in row.get("videos", []) for frame in video))


@pytest.mark.slow
@pytest.mark.parametrize("data_set", DATA_SETS)
def test_the_seed_and_the_split_decide_and_splits_share_no_picture(data_set: Callable[..., Any]) -> None:
    trained = list(data_set("train", 3, num_rows=100))
    assert trained == list(data_set("train", 3, num_rows=100)) != list(data_set("train", 4, num_rows=100))
    held_out = list(data_set("val", 3, num_rows=100))
    assert len(trained) == len(held_out) == 100
    # Another seed too: a row of a held-out set is in no training set.
    seen = {pictures(row) for row in (*trained, *data_set("train", 4, num_rows=100))}
    assert not seen & {pictures(row) for row in held_out}


@pytest.mark.parametrize("data_set", DATA_SETS)
def test_the_tags_are_those_of_the_media(data_set: Callable[..., Any]) -> None:
    for row in data_set("train", 0, num_rows=5):
        text = row.get("prompt") or row["problem"]
        assert text.count("<image>") == len(row.get("images", []))
        assert text.count("<video>") == len(row.get("videos", []))
        assert all(Image.open(io.BytesIO(each)).mode == "RGB" for each in pictures(row))


@pytest.mark.slow
def test_by_default_there_are_4096_rows_to_train_on_and_256_held_out() -> None:
    assert [sum(1 for _ in figures.naming(split, 0)) for split in ("train", "val")] == [4096, 256]


def test_a_data_set_is_an_entry_of_train_files() -> None:
    source = Source(
        "function", "whet.plugins.lessons.drawn.figures:counting", options={"num_rows": 2, "prompt": "<image>n"}
    )
    rows = list(_call(source, {"split": "train", "seed": 0, "tokenizer": None}))
    assert [row["prompt"] for row in rows] == ["<image>n", "<image>n"]
    with raises(DataError, key="option 'pixel'", expected=re.compile("pixels")):
        _call(Source("function", source.path, options={"pixel": 2}), {"split": "train", "seed": 0})


@pytest.mark.parametrize(("shape", "filled"), [("square", 100), ("circle", 80), ("triangle", 50)])
def test_a_figure_fills_its_square(shape: str, filled: int) -> None:
    image, drawing = canvas(20)
    draw_figure(drawing, shape, (1, 2, 3), 4, 6, 10)
    mask = image.convert("L").point(lambda value: 255 * (value < 255))
    assert mask.getbbox() == (4, 6, 14, 16)
    assert mask.histogram()[255] == pytest.approx(filled, abs=8)
    assert {colour for _, colour in image.getcolors() or []} == {(255, 255, 255), (1, 2, 3)}


def test_a_split_without_pictures_is_an_error() -> None:
    one = to_png(canvas(4)[0])
    rows = [{"images": [one], "answer": ""}]
    with raises(DataError, key="row 0", found=re.compile("64 ")):
        for split in ("train", "val"):  # a single picture is in one of them only
            list(draw_rows(split, 0, 1, lambda draws: rows[0]))
