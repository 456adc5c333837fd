# SPDX-License-Identifier: Apache-2.0
"""Encoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images of any size, merged patches, multimodal rotary positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, sqrt
from typing import Any

import torch
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from whet.data.media import images
from whet.errors import DataError
from whet.models.encoders.base import EncoderOutput, Features, Hidden, PixelLimits, Prepared, Size
from whet.models.encoders.images import ImageEncoder
from whet.registry import register_encoder
from whet.types import Media, MediaTokens

PLACEHOLDERS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
FRAME = "<|vision_start|>", "<|vision_end|>"  # around each time of a Qwen3-VL video
NAMES = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


@register_encoder("qwen2_vl/image", aliases=("qwen2_vl/video", "qwen2_5_vl/image", "qwen2_5_vl/video"))
class QwenVision(ImageEncoder):
    """Qwen2-VL, Qwen2.5-VL: a video is one run of tokens. In Qwen2.5-VL, time positions are proportional to seconds."""

    towers = ("visual",)
    processor_name = "Qwen2VLImageProcessor"
    # limits in pixels of a frame if the video processor's files give none
    frame_limits = (128 * 28 * 28, 768 * 28 * 28)

    def __init__(self, config: Any, processor: Any, files: Mapping[str, Any]) -> None:
        super().__init__(config, processor, files)
        self.merge, self.factor = processor.merge_size, processor.patch_size * processor.merge_size

    @property
    def patches_per_token(self) -> float:
        """The number of patches that are merged into a token."""
        return float(self.merge**2)

    @property
    def forbidden(self) -> tuple[int, ...]:
        return self.config.image_token_id, self.config.video_token_id

    def measure(self, kind: str, size: Size, seconds: Sequence[float], limits: PixelLimits) -> MediaTokens:
        if (most := limits[1]) is not None and most < self.factor**2:
            least = f"at least {self.factor**2}, a token of {self.factor} x {self.factor} pixels"
            raise DataError("max_pixels", most, least, "raise it, or data.max_pixels")
        times = -(-len(seconds) // self.processor.temporal_patch_size) if kind == "video" else 1
        height, width = self._resized(kind, size, limits, len(seconds))
        grid = (times, height // self.factor, width // self.factor)
        return self._tokens(kind, grid, (height, width), seconds)

    def _resized(self, kind: str, size: Size, limits: PixelLimits, num_frames: int) -> Size:
        low, high = _within(limits, self._own_limits(kind))
        height, width = smart_resize(*size, factor=self.factor, min_pixels=low, max_pixels=high)
        return height, width

    def _own_limits(self, kind: str) -> tuple[int, int]:
        if kind == "image":
            return self.processor.size["shortest_edge"], self.processor.size["longest_edge"]
        together = self.files.get("processor_config.json", {})
        made = self.files.get("video_preprocessor_config.json") or together.get("video_processor") or {}
        made = made or self.files.get("preprocessor_config.json") or {}
        size = made.get("size") or {}
        low = made.get("min_pixels") or size.get("shortest_edge")
        high = made.get("max_pixels") or size.get("longest_edge")
        return low or self.frame_limits[0], high or self.frame_limits[1]

    def _tokens(self, kind: str, grid: tuple[int, int, int], size: Size, seconds: Sequence[float]) -> MediaTokens:
        pad = PLACEHOLDERS[kind]
        count = grid[0] * grid[1] * grid[2]
        return MediaTokens(pad, ((pad, count),), self._token_id(kind), (grid,), size, self._time_step(kind, seconds))

    def _token_id(self, kind: str) -> int:
        found: int = self.config.image_token_id if kind == "image" else self.config.video_token_id
        return found

    def _time_step(self, kind: str, seconds: Sequence[float]) -> float:
        """Returns `tokens_per_second` times the seconds between two time steps in float32, as in `get_rope_index` of
        Qwen2.5-VL."""
        rate = self.config.vision_config.to_dict().get("tokens_per_second")
        if kind == "image" or rate is None or seconds[-1] == seconds[0]:
            return 1.0
        apart = (seconds[-1] - seconds[0]) / (len(seconds) - 1)
        return float(rate * torch.tensor(self.processor.temporal_patch_size * apart))

    def prepare(self, media: Media) -> Prepared:
        assert media.tokens is not None
        height, width = media.tokens.size
        values, grid = NAMES[media.kind]
        resized = [self._resize(image, height, width) for image in images(media)]
        out = self.processor(resized, do_resize=False, input_data_format="channels_first", return_tensors="pt")
        patches, grids = out["pixel_values"], out["image_grid_thw"]
        if media.kind == "video":
            patches = _in_time(patches, len(resized), self.processor.temporal_patch_size)
            grids = grids[:1].clone()
            grids[0, 0] = -(-len(resized) // self.processor.temporal_patch_size)
        return {values: patches, grid: grids}

    def _resize(self, image: Any, height: int, width: int) -> Any:
        """Resizes an RGB image like the processor.  Returns an array [3, height, width]."""
        array = self.processor.process_image(image)
        return PilBackend.resize(self.processor, array, SizeDict(height=height, width=width), self.processor.resample)

    def embed(self, body: Any, prepared: Sequence[Prepared]) -> list[Hidden]:
        values = torch.cat([_first(each, "pixel_values") for each in prepared])
        grids = torch.cat([_first(each, "grid_thw") for each in prepared])
        out = body.get_image_features(values, grids, return_dict=True)
        deep = out.get("deepstack_features") or []
        return [(hidden, tuple(layer[place] for layer in deep)) for place, hidden in enumerate(out.pooler_output)]

    def output(self, features: Sequence[Features]) -> EncoderOutput:
        deep = [tuple(layer) for layer in zip(*(each.deepstack for each in features), strict=True)]
        return EncoderOutput(tuple(each.hidden for each in features), deep)

    def smallest(self) -> Prepared:
        """Returns an image of one token: `merge` x `merge` patches."""
        own = self.processor
        size = 3 * own.temporal_patch_size * own.patch_size**2
        return {
            "pixel_values": torch.zeros(self.merge**2, size),
            "image_grid_thw": torch.tensor([[1, self.merge, self.merge]]),
        }


@register_encoder("qwen3_vl/image", aliases=("qwen3_vl/video", "qwen3_vl_moe/image", "qwen3_vl_moe/video"))
class Qwen3Vision(QwenVision):
    """Qwen3-VL: each time step of a video is a separate run of tokens, after a text with its time in seconds."""

    frame_limits = (128 * 32 * 32, 768 * 32 * 32)  # of all frames together

    def _resized(self, kind: str, size: Size, limits: PixelLimits, num_frames: int) -> Size:
        if kind == "image":
            return super()._resized(kind, size, limits, num_frames)
        num_frames = max(num_frames, self.processor.temporal_patch_size)
        low, high = _within(
            tuple(each and each * num_frames for each in limits),  # type: ignore[arg-type]
            self._own_limits(kind),
        )
        return _resized_video(num_frames, size, self.processor.temporal_patch_size, self.factor, low, high)

    def _tokens(self, kind: str, grid: tuple[int, int, int], size: Size, seconds: Sequence[float]) -> MediaTokens:
        if kind == "image":
            return super()._tokens(kind, grid, size, seconds)
        pad, (start, end), (_, height, width) = PLACEHOLDERS[kind], FRAME, grid
        text: list[tuple[str, int]] = []
        for time in _times(seconds, self.processor.temporal_patch_size):
            text += [(f"<{time:.1f} seconds>{start}", 1), (pad, height * width), (end, 1)]
        return MediaTokens(pad, tuple(text), self._token_id(kind), ((1, height, width),) * grid[0], size, 1)

    def _time_step(self, kind: str, seconds: Sequence[float]) -> float:
        return 1.0


def _within(limits: PixelLimits, own: tuple[int, int]) -> tuple[int, int]:
    """Returns limits in pixels. A missing limit is the processor's `own`, changed if it contradicts a given limit."""
    low, high = limits
    if low is None:
        low = own[0] if high is None else min(own[0], high)
    if high is None:
        high = max(own[1], low)
    return low, high


def _resized_video(num_frames: int, size: Size, step: int, factor: int, fewest: int, most: int) -> Size:
    """Computes height and width as multiples of `factor`; all frames together have `fewest` to `most` pixels.

    Equals `smart_resize` in transformers' video_processing_qwen3_vl, which requires torchvision in some versions.
    Raises: ValueError."""
    height, width = size
    if min(size) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > 200:
        raise ValueError(f"the longer side is {max(height, width) / min(height, width):.0f} times the shorter, not 200")
    sides = [round(side / factor) * factor for side in (height, width)]
    pixels, filled = num_frames * height * width, round(num_frames / step) * step * sides[0] * sides[1]
    if filled > most:
        sides = [max(factor, floor(side / sqrt(pixels / most) / factor) * factor) for side in (height, width)]
    elif filled < fewest:
        sides = [ceil(side * sqrt(fewest / pixels) / factor) * factor for side in (height, width)]
    return sides[0], sides[1]


def _times(seconds: Sequence[float], step: int) -> list[float]:
    """Returns the mean of first and last second of each group of `step` frames. The last frame fills the last group."""
    filled = [*seconds, *[seconds[-1]] * (-len(seconds) % step)]
    return [(filled[at] + filled[at + step - 1]) / 2 for at in range(0, len(filled), step)]


def _in_time(patches: torch.Tensor, num_frames: int, step: int) -> torch.Tensor:
    """Groups the patches of F frames into T = ceil(F / step) time steps: [F h w, 3 step p p] -> [T h w, 3 step p p].

    The input has each frame `step` times; a time step has `step` frames. The last frame fills the last time step."""
    frames = patches.view(num_frames, -1, 3, step, patches.shape[1] // (3 * step))[:, :, :, 0]  # [F, h w, 3, p p]
    frames = torch.cat([frames, frames[-1:].expand(-num_frames % step, -1, -1, -1)])
    together = frames.unflatten(0, (-1, step)).permute(0, 2, 3, 1, 4)  # [T, h w, 3, step, p p]
    return together.reshape(-1, patches.shape[1])


def _first(prepared: Prepared, name: str) -> torch.Tensor:
    """Returns the first tensor whose name contains `name`, for an image or a video."""
    return next(value for key, value in prepared.items() if name in key)
