# SPDX-License-Identifier: Apache-2.0
"""LLaVA-OneVision: an image as a whole and in tiles without their padding, with a token that ends each line; frames of
a video at half the resolution."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from typing import Any

import torch
from PIL import Image
from transformers.image_processing_utils import select_best_resolution

from whet.data.media import images
from whet.models.encoders.base import EncoderOutput, Features, Hidden, PixelLimits, Prepared, Size
from whet.models.encoders.images import ImageEncoder
from whet.registry import register_encoder
from whet.types import Media, MediaTokens


@register_encoder("llava_onevision/image")
class LlavaVision(ImageEncoder):
    """Images, each with the tiles that transformers gives the only image of a prompt.

    An image of more than `max_pixels` is reduced before it is cut; `min_pixels` has no effect.
    """

    towers = ("vision_tower", "multi_modal_projector", "image_newline")
    processor_name = "LlavaOnevisionImageProcessor"

    @property
    def across(self) -> int:
        """Patches on a side of a tile."""
        vision = self.config.vision_config
        return int(vision.image_size // vision.patch_size)

    @property
    def side(self) -> int:
        """Pixels of a tile's side."""
        return int(self.config.vision_config.image_size)

    patches_per_token = 1.0

    @property
    def forbidden(self) -> tuple[int, ...]:
        return (self.config.image_token_id,)

    def measure(self, kind: str, size: Size, seconds: Sequence[float], limits: PixelLimits) -> MediaTokens:
        scale = 1.0 if limits[1] is None else min(1.0, sqrt(limits[1] / (size[0] * size[1])))
        height, width = (max(1, int(length * scale)) for length in size)
        rows, columns = self._unpadded(height, width)
        count = self.across**2 + rows * (columns + 1)
        return MediaTokens("<image>", (("<image>", count),), self.config.image_token_id, ((1, 1, count),), (height, width))

    def _unpadded(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of an image's patches in its tiles, as `pack_image_features` of the model leaves them."""
        best = select_best_resolution((height, width), self.config.image_grid_pinpoints)
        rows, columns = (length // self.side * self.across for length in best)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        most = int(self.config.vision_aspect_ratio.strip("anyres_max_"))
        ratio = sqrt(rows * columns / (most * self.across**2))
        return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)

    def prepare(self, media: Media) -> Prepared:
        assert media.tokens is not None
        [image], (height, width) = images(media), media.tokens.size
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        out = self.processor([image], return_tensors="pt")
        return {"pixel_values": out["pixel_values"][0], "image_sizes": out["image_sizes"]}

    def embed(self, body: Any, prepared: Sequence[Prepared]) -> list[Hidden]:
        joined = {name: torch.cat([each[name] for each in prepared]) for name in prepared[0]}
        return [(each, ()) for each in body.get_image_features(**joined, return_dict=True).pooler_output]

    def output(self, features: Sequence[Features]) -> EncoderOutput:
        return EncoderOutput([each.hidden for each in features])

    def smallest(self) -> Prepared:
        """An image of one tile, and as a whole."""
        pixels = torch.zeros(2, 3, self.side, self.side)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[self.side, self.side]])}


@register_encoder("llava_onevision/video")
class LlavaVideo(LlavaVision):
    """Videos: a frame is one tile, and a token ends the last."""

    @property
    def forbidden(self) -> tuple[int, ...]:
        return (self.config.video_token_id,)

    def measure(self, kind: str, size: Size, seconds: Sequence[float], limits: PixelLimits) -> MediaTokens:
        count = len(seconds) * ceil(self.across / 2) ** 2 + 1
        own = (self.side, self.side)
        return MediaTokens("<video>", (("<video>", count),), self.config.video_token_id, ((1, 1, count),), own)

    def prepare(self, media: Media) -> Prepared:
        frames = [each.resize((self.side, self.side), self.processor.resample) for each in images(media)]
        # Of a square of a tile's size the first tile is the whole image.
        return {"pixel_values_videos": self.processor(frames, return_tensors="pt")["pixel_values"][:, 0]}

    def embed(self, body: Any, prepared: Sequence[Prepared]) -> list[Hidden]:
        videos = [each["pixel_values_videos"][None] for each in prepared]
        return [(body.get_video_features(each, return_dict=True).pooler_output[0], ()) for each in videos]

    def output(self, features: Sequence[Features]) -> EncoderOutput:
        return EncoderOutput(torch.cat([each.hidden for each in features])[None])

    def smallest(self) -> Prepared:
        return {"pixel_values_videos": torch.zeros(1, 3, self.side, self.side)}
