# SPDX-License-Identifier: Apache-2.0
"""Tokens and pixels of SmolVLM, InternVL, Gemma 3 and LLaVA-OneVision against the processors of transformers."""

import re
from collections.abc import Callable
from datetime import timedelta
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3Processor, InternVLProcessor, LlavaOnevisionProcessor
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.models.encoders.conftest import image_of, picture, text_of, video_of
from tests.raising import raises
from whet.errors import DataError
from whet.models.encoders.base import Encoders
from whet.models.encoders.load import encoders_of
from whet.models.encoders.tiles import _in_words
from whet.models.load import load_tokenizer

SIZES = [(32, 32), (64, 64), (33, 190), (5, 7), (700, 300), (70, 41), (41, 41), (1, 50), (90, 89), (300, 31)]
Folders = Callable[[str], Path]


def vision_at(folder: Path) -> Encoders:
    found = encoders_of(load_tokenizer(folder))
    assert found is not None
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("max_pixels", [None, 41 * 41, 10])
def test_smolvlm_cuts_rows_and_columns_as_transformers(
    size: tuple[int, int], max_pixels: int | None, folder_of: Folders
) -> None:
    vision = vision_at(folder_of("smolvlm"))
    media = vision.measured(image_of(picture(3, *size)), *size, max_pixels=max_pixels)
    limits = {None: 64, 41 * 41: 41, 10: 32}  # own; the root of the limit; a tile
    own = {"size": {"longest_edge": limits[max_pixels]}, "return_row_col_info": True}
    expected = vision.by_kind["image"].processor([[picture(3, *size)]], **own, return_tensors="pt")
    found = vision.prepared(media)
    assert found.keys() == {"pixel_values", "pixel_attention_mask"}
    for name, value in found.items():
        assert torch.equal(value, expected[name])
    (rows,), (columns,) = expected["rows"][0], expected["cols"][0]
    marks = ("<fake_token_around_image>", "<image>", "<global-img>")
    assert text_of(media) == get_image_prompt_string(rows, columns, 4, *marks)
    assert media.tokens is not None
    assert media.tokens.grids == ((1, 1, 4),) * (rows * columns + 1)
    assert media.tokens.time_step is None
    assert len(found["pixel_values"][0]) == len(media.tokens.grids)


def test_a_video_of_smolvlm_is_a_list_of_frames_with_times(folder_of: Folders) -> None:
    vision = vision_at(folder_of("smolvlm"))
    frames = [picture(seed, 50, 40) for seed in range(3)]
    media = vision.measured(video_of(frames), 50, 40, [0.0, 30.0, 75.5])
    one = "<fake_token_around_image><global-img><image><image><image><image><fake_token_around_image>"
    assert text_of(media) == (
        "You are provided the following series of three frames from a 0:01:15 [H:MM:SS] video.\n"
        f"\nFrame from 00:00:{one}\nFrame from 00:30:{one}\nFrame from 01:15:{one}\n\n"
    )
    assert str(timedelta(seconds=75)) == "0:01:15"
    expected = vision.by_kind["image"].processor([frames], do_image_splitting=False, return_tensors="pt")
    assert torch.equal(vision.prepared(media)["pixel_values"], expected["pixel_values"])


def test_numbers_in_words() -> None:
    expected = {1: "one", 13: "thirteen", 20: "twenty", 64: "sixty-four", 100: "one hundred"}
    assert {number: _in_words(number) for number in expected} == expected
    assert _in_words(768) == "seven hundred and sixty-eight"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("low", "high"), [(None, None), (None, 2 * 32 * 32), (4 * 32 * 32, None)])
def test_internvl_cuts_tiles_as_transformers(
    size: tuple[int, int], low: int | None, high: int | None, folder_of: Folders
) -> None:
    vision = vision_at(folder_of("internvl"))
    media = vision.measured(image_of(picture(4, *size)), *size, min_pixels=low, max_pixels=high)
    limits = {"min_patches": 4 if low else 1, "max_patches": 2 if high else 6}
    expected = vision.by_kind["image"].processor(
        [picture(4, *size)], crop_to_patches=True, **limits, return_tensors="pt"
    )
    found = vision.prepared(media)
    assert torch.equal(found["pixel_values"], expected["pixel_values"])
    stock = SimpleNamespace(
        image_token="<IMG_CONTEXT>", start_image_token="<img>", end_image_token="</img>", image_seq_length=4
    )
    assert text_of(media) == InternVLProcessor.replace_image_token(stock, dict(expected), 0)
    assert media.tokens is not None
    assert media.tokens.count == 4 * len(found["pixel_values"])
    assert len(media.tokens.grids) == 1


def test_a_frame_of_internvl_is_a_tile(folder_of: Folders) -> None:
    vision = vision_at(folder_of("internvl"))
    frames = [picture(seed, 50, 40) for seed in range(3)]
    media = vision.measured(video_of(frames), 50, 40, [0.0, 0.5, 1.0])
    found = vision.prepared(media)
    expected = vision.by_kind["image"].processor(frames, crop_to_patches=False, return_tensors="pt")
    assert torch.equal(found["pixel_values"], expected["pixel_values"]) and len(found["pixel_values"]) == 3
    stock = SimpleNamespace(
        image_token="<IMG_CONTEXT>", start_image_token="<img>", end_image_token="</img>", image_seq_length=4
    )
    made = {"pixel_values_videos": found["pixel_values"][None]}
    assert text_of(media) == InternVLProcessor.replace_video_token(stock, made, 0)
    assert media.tokens is not None and media.tokens.count == 12


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("max_pixels", [None, 900])
def test_llava_onevision_cuts_tiles_as_transformers(
    size: tuple[int, int], max_pixels: int | None, folder_of: Folders
) -> None:
    vision = vision_at(folder_of("llava_onevision"))
    media = vision.measured(image_of(picture(6, *size)), *size, max_pixels=max_pixels)
    assert media.tokens is not None and (max_pixels is None or prod(media.tokens.size) <= max_pixels)
    processor, image = vision.by_kind["image"].processor, picture(6, *size)
    if media.tokens.size != size:
        image = image.resize(media.tokens.size[::-1], 3)
    expected, found = processor([image], return_tensors="pt"), vision.prepared(media)
    assert torch.equal(found["pixel_values"], expected["pixel_values"][0])
    assert torch.equal(found["image_sizes"], expected["image_sizes"])
    stock: Any = SimpleNamespace(
        image_token="<image>",
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_3",
        image_processor=processor,
    )
    for name in ("_get_number_of_features", "_get_unpadded_features"):
        setattr(stock, name, getattr(LlavaOnevisionProcessor, name).__get__(stock))
    assert text_of(media) == LlavaOnevisionProcessor.replace_image_token(stock, dict(expected), 0)


def test_a_video_of_llava_onevision_has_a_quarter_of_the_tokens(folder_of: Folders) -> None:
    """Frames of the tower's size need no resizing, which torchvision would do in transformers."""
    vision = vision_at(folder_of("llava_onevision"))
    frames = [picture(seed, 32, 32) for seed in range(3)]
    media, processor = vision.measured(video_of(frames), 32, 32, [0.0, 0.5, 1.0]), vision.by_kind["video"].processor
    found = vision.prepared(media)["pixel_values_videos"]
    pixels = torch.stack([torch.from_numpy(np.array(each)).permute(2, 0, 1) for each in frames]) / 255
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (processor.image_mean, processor.image_std))
    torch.testing.assert_close(found, (pixels - mean) / std, atol=1e-6, rtol=0)
    stock = SimpleNamespace(video_token="<video>", num_image_tokens=16)
    expected = LlavaOnevisionProcessor.replace_video_token(stock, {"pixel_values_videos": found[None]}, 0)
    assert text_of(media) == expected == "<video>" * 13


def test_gemma_3_reads_a_square(folder_of: Folders) -> None:
    vision = vision_at(folder_of("gemma3"))
    media = vision.measured(image_of(picture(5, 50, 20)), 50, 20)
    expected = vision.by_kind["image"].processor([picture(5, 50, 20)], return_tensors="pt")
    assert torch.equal(vision.prepared(media)["pixel_values"], expected["pixel_values"])
    stock = SimpleNamespace(full_image_sequence=f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n")
    assert text_of(media) == Gemma3Processor.replace_image_token(stock, dict(expected), 0)
    with raises(DataError, "video", found=re.compile("gemma3 reads images")):
        vision.measured(video_of([picture(5, 50, 20)]), 50, 20, [0.0])
