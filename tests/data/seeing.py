# SPDX-License-Identifier: Apache-2.0
"""A vision for tests of data: a token for every 28 x 28 pixels, and for every two frames of a video."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from whet.types import Media, MediaTokens

PATCH = 28
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'video') %}<|vision_start|><|{{ part['type'] }}_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class PatchVision:
    """Counts patches of the size that limits leave."""

    kinds = frozenset({"image", "video"})

    def __init__(self, tokenizer: Any) -> None:
        self.ids = {kind: tokenizer.convert_tokens_to_ids(name) for kind, name in (("image", IMAGE), ("video", VIDEO))}
        self.forbidden = tuple(self.ids.values())
        self.seconds: list[tuple[float, ...]] = []  # of each video

    def measured(
        self,
        media: Media,
        height: int,
        width: int,
        seconds: Sequence[float] = (),
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
    ) -> Media:
        while max_pixels is not None and height * width > max_pixels:
            height, width = height // 2, width // 2
        if media.kind == "video":
            self.seconds.append(tuple(seconds))
        grid = (-(-max(1, len(seconds)) // 2), -(-height // PATCH), -(-width // PATCH))
        pad, count = (IMAGE if media.kind == "image" else VIDEO), grid[0] * grid[1] * grid[2]
        return replace(
            media, tokens=MediaTokens(pad, ((pad, count),), self.ids[media.kind], (grid,), (height, width), 1.0)
        )


def seeing(tokenizer: Any) -> Any:
    """The tokenizer with tokens for images and videos, a template that writes them, and its vision."""
    names = ["<|vision_start|>", "<|vision_end|>", IMAGE, VIDEO]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.chat_template = TEMPLATE
    tokenizer.encoders = PatchVision(tokenizer)
    return tokenizer


def picture(width: int = 56, height: int = 28, colour: Any = (200, 30, 30), mode: str = "RGB") -> Image.Image:
    """An image of one colour."""
    return Image.new(mode, (width, height), colour)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image file."""
    with io.BytesIO() as file:
        image.save(file, form, **options)
        return file.getvalue()
