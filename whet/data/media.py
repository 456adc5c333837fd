# SPDX-License-Identifier: Apache-2.0
"""Images and the frames of videos, decoded."""

from __future__ import annotations

import io

from PIL import Image, ImageSequence

from whet.types import Media


def images(media: Media) -> list[Image.Image]:
    """RGB images: one of an image, the chosen frames of a video."""
    if isinstance(media.source, tuple):
        return [_open(each).convert("RGB") for each in media.source]
    if media.kind == "image":
        return [_open(media.source).convert("RGB")]
    frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(_open(media.source))]
    return [frames[place] for place in media.frames]


def _open(source: str | bytes) -> Image.Image:
    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
