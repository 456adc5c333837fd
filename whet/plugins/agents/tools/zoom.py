# SPDX-License-Identifier: Apache-2.0
"""A shipped tool that enlarges a part of an image that the model has read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from PIL import Image

from whet.data.media import images
from whet.options import Count, Positive
from whet.registry import register_tool
from whet.types import Media, Prompt


@register_tool("zoom")
class Zoom:
    """Shows a part of an image, enlarged by `scale`. The image is from the prompt, an observation or an earlier call.

    `unit` is the unit of boxes: `resized` means pixels of the image as the model reads it (Qwen2.5-VL); `pixels`, of
    the original image; `thousandths`, of its width and height (Qwen3-VL). A part with a side below `smallest` pixels is
    an error."""

    def __init__(
        self,
        prompt: Prompt,
        *,
        unit: Literal["resized", "pixels", "thousandths"] = "resized",
        scale: Positive = 2.0,
        smallest: Count = 8,
    ) -> None:
        self._unit, self._scale, self._smallest = unit, scale, smallest
        self.shown(prompt.media)

    def shown(self, media: Sequence[Media]) -> None:
        """Receives the images that the model has read so far."""
        self._images = [each for each in media if each.kind == "image"]

    def zoom(self, box: list[float], image: int = 1) -> Image.Image:
        """Shows a part of an image, enlarged.

        Args:
            box: the part as [x1, y1, x2, y2], from the upper left to the lower right corner
            image: the number of the image in the conversation, from 1
        """
        if not 1 <= image <= len(self._images):
            raise ValueError(f"image is {image}, and there are {len(self._images)}; give a number from 1")
        if len(box) != 4 or not all(map(math.isfinite, box)):
            raise ValueError(f"box has {len(box)} numbers; expected four: [x1, y1, x2, y2]")
        media = self._images[image - 1]
        [whole] = images(media)
        height, width = {
            "resized": media.tokens.size if media.tokens else whole.size[::-1],
            "pixels": whole.size[::-1],
            "thousandths": (1000, 1000),
        }[self._unit]
        across, down = whole.width / width, whole.height / height
        x1, x2 = (min(max(0, round(x * across)), whole.width) for x in (box[0], box[2]))
        y1, y2 = (min(max(0, round(y * down)), whole.height) for y in (box[1], box[3]))
        if min(x2 - x1, y2 - y1) < self._smallest:
            raise ValueError(
                f"the part has {x2 - x1} x {y2 - y1} pixels; expected at least {self._smallest} a side, as [x1, y1, "
                f"x2, y2] in an image of {width} x {height}"
            )
        size = (round((x2 - x1) * self._scale), round((y2 - y1) * self._scale))
        return whole.crop((x1, y1, x2, y2)).resize(size, Image.Resampling.BICUBIC)
