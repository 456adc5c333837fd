# SPDX-License-Identifier: Apache-2.0
"""Encoders of SmolVLM, InternVL and Gemma 3: square tiles with a fixed number of tokens, one-dimensional positions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import ceil, isqrt
from typing import Any

import numpy as np
import torch
from transformers.models.smolvlm.image_processing_pil_smolvlm import get_resize_output_image_size

from whet.data.media import images
from whet.models.encoders.base import EncoderOutput, Features, Hidden, PixelLimits, Prepared, Size
from whet.models.encoders.images import ImageEncoder
from whet.options import as_list
from whet.registry import register_encoder
from whet.types import Media, MediaTokens


class TiledVision(ImageEncoder):
    """The base class of encoders whose tower reads tiles [n, 3, side, side]. All media of a model have one token id."""

    streams = {"video": "image"}  # noqa: RUF012
    towers = ("vision_tower", "multi_modal_projector")
    per_tile: int  # tokens

    @property
    def patches_per_token(self) -> float:
        """The number of patches of a tile, divided by the number of its tokens."""
        return int(self.side // as_list(self.config.vision_config.patch_size)[0]) ** 2 / self.per_tile

    @property
    def forbidden(self) -> tuple[int, ...]:
        """The id of the patch token."""
        return (self.config.image_token_id,)

    @property
    def side(self) -> int:
        """The side of a tile in pixels."""
        return int(self.processor.size["height"])

    def embed(self, body: Any, prepared: Sequence[Prepared]) -> list[Hidden]:
        counts = [each["pixel_values"].shape[self._tile_axis] * self.per_tile for each in prepared]
        joined = {name: torch.cat([each[name] for each in prepared], self._tile_axis) for name in prepared[0]}
        out = body.get_image_features(**joined, return_dict=True).pooler_output
        hidden = torch.cat(out) if isinstance(out, list | tuple) else out.flatten(0, 1)
        return [(each, ()) for each in hidden.split(counts)]

    _tile_axis = 0

    def output(self, features: Sequence[Features]) -> EncoderOutput:
        return EncoderOutput(torch.cat([each.hidden for each in features]))

    def smallest(self) -> Prepared:
        """Returns an image of one tile."""
        return {"pixel_values": torch.zeros(1, 3, self.side, self.side)}


@register_encoder("smolvlm/image", aliases=("smolvlm/video",))
class SmolVision(TiledVision):
    """SmolVLM: resizes an image to `longest_edge`, cuts it into rows and columns of tiles, and adds the whole image.

    The longest edge is at most max(sqrt(`max_pixels`), a tile's side); `min_pixels` has no effect."""

    towers = ("vision_model", "connector")
    processor_name = "SmolVLMImageProcessor"
    image, fence, whole = "<image>", "<fake_token_around_image>", "<global-img>"
    intro = "You are provided the following series of {count} frames from a {duration} [H:MM:SS] video.\n"
    _tile_axis = 1  # axis 0 is a batch of 1

    def __init__(self, config: Any, processor: Any, files: Mapping[str, Any]) -> None:
        super().__init__(config, processor, files)
        across = config.vision_config.image_size // config.vision_config.patch_size
        self.per_tile = across**2 // config.scale_factor**2

    @property
    def side(self) -> int:
        return int(self.processor.max_image_size["longest_edge"])

    def measure(self, kind: str, size: Size, seconds: Sequence[float], limits: PixelLimits) -> MediaTokens:
        longest = self.processor.size["longest_edge"]
        if limits[1] is not None:
            longest = min(longest, max(self.side, isqrt(limits[1])))
        rows = columns = 0
        if kind == "image" and self.processor.do_image_splitting:
            rows, columns = self._cuts(size, longest)
        text = self._video_text(seconds) if kind == "video" else self._image_text(rows, columns)
        runs = sum(piece == self.image for piece, _ in text)
        grids = ((1, 1, self.per_tile),) * runs
        placeholder = "<video>" if kind == "video" else self.image
        # The size is a square of the longest edge: `prepare` needs only this edge and the image.
        return MediaTokens(placeholder, tuple(text), self.config.image_token_id, grids, (longest, longest))

    def _cuts(self, size: Size, longest: int) -> tuple[int, int]:
        """Returns the rows and columns of tiles as in the processor's `resize_for_vision_encoder`, because its
        `get_number_of_image_patches` rounds differently. 0 and 0 for an image of one tile."""
        shape = np.broadcast_to(np.uint8(0), (3, *size))
        height, width = get_resize_output_image_size(shape, resolution_max_side=longest)
        aspect, side = width / height, self.side
        if width >= height:
            columns = ceil(width / side)
            rows = ceil(int(columns * side / aspect) / side)
        else:
            rows = ceil(height / side)
            columns = ceil(int(rows * side * aspect) / side)
        return (rows, columns) if rows * columns > 1 else (0, 0)

    def _image_text(self, rows: int, columns: int) -> list[tuple[str, int]]:
        text: list[tuple[str, int]] = []
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                before = "\n" if row > 1 and column == 1 else ""
                text += [(f"{before}{self.fence}<row_{row}_col_{column}>", 1), (self.image, self.per_tile)]
        before = "\n\n" if rows else ""
        return [*text, (f"{before}{self.fence}{self.whole}", 1), (self.image, self.per_tile), (self.fence, 1)]

    def _video_text(self, seconds: Sequence[float]) -> list[tuple[str, int]]:
        duration = timedelta(seconds=int(seconds[-1]))
        text = [(self.intro.format(count=_in_words(len(seconds)), duration=duration), 1)]
        for second in seconds:
            text += [(f"\nFrame from {int(second // 60):02d}:{int(second % 60):02d}:", 1), *self._image_text(0, 0)]
        return [*text, ("\n\n", 1)]

    def prepare(self, media: Media) -> Prepared:
        assert media.tokens is not None
        split = self.processor.do_image_splitting and media.kind == "image"
        size = {"longest_edge": media.tokens.size[0]}
        out = self.processor([images(media)], size=size, do_image_splitting=split, return_tensors="pt")
        return {name: out[name] for name in ("pixel_values", "pixel_attention_mask")}

    def smallest(self) -> Prepared:
        side = self.side
        mask = torch.ones(1, 1, side, side, dtype=torch.int64)
        return {"pixel_values": torch.zeros(1, 1, 3, side, side), "pixel_attention_mask": mask}


@register_encoder("internvl/image", aliases=("internvl/video",))
class InternVision(TiledVision):
    """InternVL: cuts an image into the grid of tiles nearest to its shape, and adds the whole image. A frame of a video
    is one tile.

    `max_pixels` lowers, and `min_pixels` raises, the number of an image's tiles within the processor's own range."""

    processor_name = "GotOcr2ImageProcessor"

    def __init__(self, config: Any, processor: Any, files: Mapping[str, Any]) -> None:
        super().__init__(config, processor, files)
        self.per_tile = config.image_seq_length

    def measure(self, kind: str, size: Size, seconds: Sequence[float], limits: PixelLimits) -> MediaTokens:
        if kind == "video":
            return self._frames(len(seconds))
        fewest, most = self.processor.min_patches, self.processor.max_patches
        low, high = (None if each is None else max(1, min(most, each // self.side**2)) for each in limits)
        most = max(fewest, most if high is None else high)
        fewest = min(most, max(fewest, low or 1))
        options = {"crop_to_patches": True, "min_patches": fewest, "max_patches": most}
        tiles = self.processor.get_number_of_image_patches(*size, options)
        text = (("<img>", 1), ("<IMG_CONTEXT>", tiles * self.per_tile), ("</img>", 1))
        grid = (tiles, 1, self.per_tile)
        cut = max(1, tiles - 1)  # without the whole image
        return MediaTokens("<IMG_CONTEXT>", text, self.config.image_token_id, (grid,), (self.side, cut * self.side))

    def _frames(self, count: int) -> MediaTokens:
        text: list[tuple[str, int]] = []
        for number in range(1, count + 1):
            before = f"{'' if number == 1 else chr(10)}Frame{number}: <img>"
            text += [(before, 1), ("<IMG_CONTEXT>", self.per_tile), ("</img>", 1)]
        grids = ((1, 1, self.per_tile),) * count
        return MediaTokens("<video>", tuple(text), self.config.image_token_id, grids, (self.side, self.side))

    def prepare(self, media: Media) -> Prepared:
        assert media.tokens is not None
        cut = media.tokens.size[1] // self.side
        options = {"crop_to_patches": media.kind == "image", "min_patches": cut, "max_patches": cut}
        return {"pixel_values": self.processor(images(media), **options, return_tensors="pt")["pixel_values"]}


@register_encoder("gemma3/image")
class Gemma3Vision(TiledVision):
    """Gemma 3: resizes every image to one square. Its tokens attend to each other in both directions."""

    both_ways = True
    processor_name = "Gemma3ImageProcessor"

    def __init__(self, config: Any, processor: Any, files: Mapping[str, Any]) -> None:
        super().__init__(config, processor, files)
        self.per_tile = config.mm_tokens_per_image

    def measure(self, kind: str, size: Size, seconds: Sequence[float], limits: PixelLimits) -> MediaTokens:
        start = "<start_of_image>"
        text = ((f"\n\n{start}", 1), ("<image_soft_token>", self.per_tile), ("<end_of_image>\n\n", 1))
        grid = (1, 1, self.per_tile)
        return MediaTokens(start, text, self.config.image_token_id, (grid,), (self.side, self.side))

    def prepare(self, media: Media) -> Prepared:
        out = self.processor(images(media), do_pan_and_scan=False, return_tensors="pt")
        return {"pixel_values": out["pixel_values"]}


_WORDS = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)
_TENS = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")


def _in_words(number: int) -> str:
    """Writes a number up to 999 in English words, as num2words does."""
    if number < 20:
        return _WORDS[number]
    if number < 100:
        tens, ones = _TENS[number // 10 - 2], number % 10
        return f"{tens}-{_WORDS[ones]}" if ones else tens
    rest = f" and {_in_words(number % 100)}" if number % 100 else ""
    return f"{_WORDS[number // 100]} hundred{rest}"
