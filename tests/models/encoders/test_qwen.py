# SPDX-License-Identifier: Apache-2.0
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from tests.models.encoders.conftest import image_of, picture, text_of, video_of
from tests.raising import raises
from whet.data.media import MediaLimits, MediaReader
from whet.errors import DataError
from whet.models.encoders.base import Encoders
from whet.models.encoders.load import encoders_of
from whet.models.load import load_tokenizer
from whet.types import Media

QWEN = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
# Height and width: square, narrow, smaller than a patch, far too large, not a multiple of a patch.
SIZES = [(64, 64), (33, 190), (5, 7), (700, 900), (70, 41)]
Folders = Callable[[str], Path]
VIDEO = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
PROCESSORS = {
    "qwen2_vl": transformers.Qwen2VLProcessor,
    "qwen2_5_vl": transformers.Qwen2_5_VLProcessor,
    "qwen3_vl": transformers.Qwen3VLProcessor,
}


def video_processor(folder: Path) -> Any:
    """Transformers' own processor; Qwen2-VL's, with the same patches, cannot be imported without torchvision."""
    return VIDEO.Qwen3VLVideoProcessor.from_pretrained(folder)


def stock(family: str, folder: Path) -> Any:
    """Transformers' processor, which accepts another video processor than torchvision's."""
    known = {"check_argument_for_proper_class": lambda self, name, argument: type(argument)}
    made = type("Stock", (PROCESSORS[family],), known)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    image_processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return made(image_processor, tokenizer, video_processor(folder), tokenizer.chat_template)


def vision_at(folder: Path) -> Encoders:
    found = encoders_of(load_tokenizer(folder))
    assert found is not None
    return found


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("size", SIZES)
def test_the_tokens_and_pixels_of_an_image_are_those_of_transformers_processor(
    family: str, size: tuple[int, int], folder_of: Folders
) -> None:
    folder = folder_of(family)
    vision, processor = vision_at(folder), stock(family, folder)
    image = picture(1, *size)
    media = vision.measured(image_of(image), *size)
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}], tokenize=False
    )
    expected = processor(text=[text], images=[image], return_tensors="pt")
    assert media.tokens is not None
    ids = processor.tokenizer(text.replace(media.tokens.placeholder, text_of(media)))["input_ids"]
    assert ids == expected["input_ids"][0].tolist()
    assert ids.count(media.tokens.token_id) == media.tokens.count
    found = vision.prepared(media)
    assert found.keys() == {"pixel_values", "image_grid_thw"}
    for name, value in found.items():
        assert torch.equal(value, expected[name])
    (grid,) = media.tokens.grids
    assert [grid[0], 2 * grid[1], 2 * grid[2]] == found["image_grid_thw"][0].tolist()


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize(("low", "high"), [(None, 16 * 16 * 8), (16 * 16 * 40, None), (16 * 16 * 30, 16 * 16 * 40)])
def test_limits_in_pixels_stand_in_place_of_the_processors_own(
    family: str, low: int | None, high: int | None, folder_of: Folders
) -> None:
    vision = vision_at(folder_of(family))
    media = vision.measured(image_of(picture(1, 90, 80)), 90, 80, min_pixels=low, max_pixels=high)
    own = vision.by_kind["image"].processor.size
    limits = {"shortest_edge": low or own["shortest_edge"], "longest_edge": high or own["longest_edge"]}
    expected = vision.by_kind["image"].processor([picture(1, 90, 80)], size=limits, return_tensors="pt")
    assert torch.equal(vision.prepared(media)["pixel_values"], expected["pixel_values"])
    assert media.tokens is not None
    assert (low or 0) <= media.tokens.size[0] * media.tokens.size[1] <= (high or 10**9)


@pytest.mark.parametrize(
    ("limits", "key", "fields"),
    [
        # 10**9 pixels in tokens of 16 x 16: the text of 3.9 million tokens is never written
        (
            {"min_pixels": 999_999_999},
            "number of tokens",
            {
                "found": re.compile(r"^39\d{5}$"),
                "expected": re.compile("262,144$"),
                "change": re.compile("min_pixels=9{9} "),
            },
        ),
        ({"max_pixels": 255}, "max_pixels", {"found": 255, "expected": re.compile(" 256, .* 16 x 16 ")}),
    ],
)
def test_limits_that_no_image_fits_are_named(
    limits: dict[str, int], key: str, fields: dict[str, object], folder_of: Folders
) -> None:
    reader = MediaReader(MediaLimits(**limits), vision_at(folder_of("qwen2_vl")))  # type: ignore[arg-type]
    with raises(DataError, re.compile(f": {key}$"), **fields):
        reader.read("image", picture(1, 90, 80))


@pytest.mark.parametrize("family", QWEN)
@pytest.mark.parametrize("num_frames", [1, 2, 5])
def test_the_tokens_and_pixels_of_a_video_are_those_of_transformers_processor(
    family: str, num_frames: int, folder_of: Folders
) -> None:
    folder = folder_of(family)
    vision, processor = vision_at(folder), stock(family, folder)
    frames = [picture(seed, 40, 70) for seed in range(num_frames)]
    seconds = [0.4 * place for place in range(num_frames)]
    media = vision.measured(video_of(frames), 40, 70, seconds)
    assert media.tokens is not None
    height, width = media.tokens.size
    limits = {"min_pixels": processor.video_processor.size["shortest_edge"]}
    limits["max_pixels"] = processor.video_processor.size["longest_edge"]
    if family == "qwen3_vl":
        assert media.tokens.size == VIDEO.smart_resize(max(2, num_frames), 40, 70, 2, 16, **limits)
    else:
        assert media.tokens.size == smart_resize(40, 70, 16, **limits)

    own = vision.by_kind["image"].processor
    arrays = [own.process_image(frame) for frame in frames]
    size = SizeDict(height=height, width=width)
    resized = [PilBackend.resize(own, array, size, own.resample) for array in arrays]
    normal = [own.normalize(own.rescale(array, own.rescale_factor), own.image_mean, own.image_std) for array in resized]
    stacked = torch.stack([torch.tensor(array, dtype=torch.float32) for array in normal])[None]
    patches, times, rows, columns = processor.video_processor.patchify(stacked, 8, 2, 2)
    found = vision.prepared(media)
    assert found["video_grid_thw"].tolist() == [[times, rows, columns]]
    torch.testing.assert_close(found["pixel_values_videos"], patches[0], atol=1e-6, rtol=0)

    metadata = SimpleNamespace(fps=2.5, frames_indices=list(range(num_frames)))
    inputs = {"video_grid_thw": found["video_grid_thw"], "video_metadata": [metadata]}
    assert text_of(media) == processor.replace_video_token(inputs, 0)
    grids = [(1, rows // 2, columns // 2)] * times if family == "qwen3_vl" else [(times, rows // 2, columns // 2)]
    assert list(media.tokens.grids) == grids


@pytest.mark.parametrize("size", [*SIZES, (15, 64), (300, 20)])
@pytest.mark.parametrize("num_frames", [2, 5, 40])
def test_the_size_of_a_qwen3_video_is_that_of_transformers(
    size: tuple[int, int], num_frames: int, folder_of: Folders
) -> None:
    vision = vision_at(folder_of("qwen3_vl"))
    media = Media("video", "v", (), tuple(range(num_frames)))
    for low, high in ((256, 65536), (2048, 2048 * 30), (256 * 4, 256 * 8)):
        limits = {"min_pixels": low, "max_pixels": high}
        found = vision.measured(media, *size, [float(place) for place in range(num_frames)], **limits).tokens
        assert found is not None
        of_all = {name: pixels * num_frames for name, pixels in limits.items()}
        assert found.size == VIDEO.smart_resize(num_frames, *size, 2, 16, **of_all)


def test_errors_name_what_was_found(folder_of: Folders) -> None:
    vision = vision_at(folder_of("qwen2_5_vl"))
    with raises(DataError, "size", found=re.compile("^1 x 900 .*aspect ratio")):
        vision.measured(image_of(picture(1, 1, 900)), 1, 900)
    with raises(DataError, "number of frames", found=0):
        vision.measured(video_of([picture(1, 9, 9)]), 9, 9, [])
