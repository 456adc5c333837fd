# SPDX-License-Identifier: Apache-2.0
"""The encoder of LLaVA-OneVision. An image is read as a whole, and in tiles without padding, with a token at the end of
each line. Frames of a video have half the resolution."""

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
from whet.options import as_list
from whet.registry import register_encoder
from whet.types import Media, MediaTokens


@register_encoder("llava_onevision/image", aliases=("llava_onevision/video",))
class LlavaVision(ImageEncoder):
    """Tiles every image by the rule that transformers uses for a prompt with one image. A frame of a video is one tile
    at half the resolution; an end token follows the last frame.

    An image over `max_pixels` is reduced before tiling; `min_pixels` has no effect."""

    towers = ("vision_tower", "multi_modal_projector", "image_newline")
    processor_name = "LlavaOnevisionImageProcessor"
    patches_per_token = 1.0

    @property
    def side(self) -> int:
        """The side of a tile in pixels."""
        return int(self.config.vision_config.image_size)

    @property
    def across(self) -> int:
        """The number of patches along a side of a tile."""
        return self.side // int(self.config.vision_config.patch_size)

    @property
    def forbidden(self) -> tuple[int, ...]:
        return self.config.image_token_id, self.config.video_token_id

    def measure(self, kind: str, size: Size, seconds: Sequence[float], limits: PixelLimits) -> MediaTokens:
        if kind == "video":
            count, token_id = len(seconds) * ceil(self.across / 2) ** 2 + 1, self.config.video_token_id
            return MediaTokens("<video>", (("<video>", count),), token_id, ((1, 1, count),), (self.side, self.side))
        scale = 1.0 if limits[1] is None else min(1.0, sqrt(limits[1] / (size[0] * size[1])))
        height, width = (max(1, int(length * scale)) for length in size)
        rows, columns = self._unpadded(height, width)
        count, token_id = self.across**2 + rows * (columns + 1), self.config.image_token_id
        return MediaTokens("<image>", (("<image>", count),), token_id, ((1, 1, count),), (height, width))

    def _unpadded(self, height: int, width: int) -> tuple[int, int]:
        """Returns how many rows and columns of an image's patches the model's `pack_image_features` keeps."""
        best = select_best_resolution((height, width), self.config.image_grid_pinpoints)
        rows, columns = (length // self.side * self.across for length in best)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        most = int(self.config.vision_aspect_ratio.removeprefix("anyres_max_"))
        ratio = sqrt(rows * columns / (most * self.across**2))
        return (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)

    def prepare(self, media: Media) -> Prepared:
        assert media.tokens is not None
        height, width = media.tokens.size
        shown = [
            each if each.size == (width, height) else each.resize((width, height), Image.Resampling.BICUBIC)
            for each in images(media)
        ]
        out = self.processor(shown, return_tensors="pt")
        if media.kind == "video":  # a frame has the size of one tile; the processor's first tile is the whole frame
            return {"pixel_values_videos": out["pixel_values"][:, 0]}
        return {"pixel_values": out["pixel_values"][0], "image_sizes": out["image_sizes"]}

    def embed(self, body: Any, prepared: Sequence[Prepared]) -> list[Hidden]:
        """Computes features in one pass of the tower over all tiles and frames, with the model's own functions."""
        tiles = [next(value for name, value in each.items() if "pixel_values" in name) for each in prepared]
        states = body.vision_tower(torch.cat(tiles), output_hidden_states=True, return_dict=True).hidden_states
        chosen = torch.cat([states[each] for each in as_list(self.config.vision_feature_layer)], -1)
        if self.config.vision_feature_select_strategy == "default":
            chosen = chosen[:, 1:]
        found, newline = list[Hidden](), body.image_newline
        parts = body.multi_modal_projector(chosen).split([len(each) for each in tiles])
        for each, part in zip(prepared, parts, strict=True):
            if "image_sizes" in each:
                kind = {"image_newline": newline, "vision_aspect_ratio": self.config.vision_aspect_ratio}
                [hidden], _ = body.pack_image_features([part], each["image_sizes"], **kind)
            else:
                hidden = torch.cat([body.apply_pooling(part).flatten(0, 1), newline[None].to(part)])
            found.append((hidden, ()))
        return found

    def output(self, features: Sequence[Features]) -> EncoderOutput:
        hidden = [each.hidden for each in features]
        return EncoderOutput(hidden if features[0].kind == "image" else torch.cat(hidden)[None])

    def smallest(self) -> Prepared:
        """Returns an image of one tile, plus the whole image."""
        pixels = torch.zeros(2, 3, self.side, self.side)
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[self.side, self.side]])}
