# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-VL's processor in an environment without torchvision, which only its part for videos needs."""

from __future__ import annotations

from typing import Any

from transformers import AutoImageProcessor, Qwen2_5_VLProcessor


class ForImages(Qwen2_5_VLProcessor):
    """The processor without the check that its part for videos is there."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Accepts any class."""
        return type(argument)


def processor(path: str, tokenizer: Any) -> ForImages:
    """The processor of the model at `path`."""
    images = AutoImageProcessor.from_pretrained(path, backend="pil")
    return ForImages(images, tokenizer, video_processor=None, chat_template=tokenizer.chat_template)
