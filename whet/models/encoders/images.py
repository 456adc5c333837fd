# SPDX-License-Identifier: Apache-2.0
"""Encoders of images: they load the files of an image processor, and check that it fits the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from transformers import AutoImageProcessor, BaseImageProcessor
from transformers.utils import cached_file

from whet.errors import ModelError
from whet.models.encoders.base import Encoder
from whet.models.folder import reading

PROCESSOR, VIDEO_PROCESSOR = "preprocessor_config.json", "video_preprocessor_config.json"
TOGETHER = "processor_config.json"


class ImageEncoder(Encoder):
    """The base class of encoders of images, and of videos frame by frame, which use transformers' image processor."""

    processor_name: ClassVar[str]  # of its processor's class, without the back end

    def __init__(self, config: Any, processor: Any, files: Mapping[str, Any]) -> None:
        self.config, self.processor, self.files = config, processor, files
        self.identity = hashlib.sha256(f"{type(self).__name__} {processor.to_json_string()}".encode()).hexdigest()

    @classmethod
    def load(cls, path: str | Path, config: Any, *, trust_remote_code: bool = False) -> Self:
        """Loads the files of the processor.  Raises: ModelError if they are missing or do not fit the model."""
        names = (PROCESSOR, VIDEO_PROCESSOR, TOGETHER)
        files = {name: content for name in names if (content := _read(path, name)) is not None}
        if (files.get(PROCESSOR) or files.get(TOGETHER, {}).get("image_processor")) is None:
            problem = f"is a model that reads images ({config.model_type}) without {PROCESSOR}"
            raise ModelError(f"{path}", problem, "", "copy this file from the folder that the model comes from")
        with reading(path, f"has a {PROCESSOR} that transformers cannot load"):
            processor: BaseImageProcessor = AutoImageProcessor.from_pretrained(
                path, backend="pil", trust_remote_code=trust_remote_code
            )
        _check_fits(path, config, processor, cls.processor_name)
        return cls(config, processor, files)

    def save(self, folder: Path) -> None:
        for name, content in self.files.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _read(path: str | Path, name: str) -> dict[str, Any] | None:
    with reading(path, f"has a damaged {name}"):
        file = cached_file(
            str(path),
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if file is None:
            return None
        found: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
        return found


def _check_fits(path: str | Path, config: Any, processor: Any, expected: str) -> None:
    """Checks that the processor belongs to the family, and that patch sizes agree.  Raises: ModelError."""
    found = type(processor).__name__
    way_out = "copy the processor's file from the folder that the model comes from"
    if not found.startswith(expected):
        raise ModelError(f"{path}", f"is {config.model_type} with a {found}", f"a {expected}", way_out)
    made, vision = processor.to_dict(), config.vision_config.to_dict()
    pairs = {
        "patch_size": "patch_size",
        "temporal_patch_size": "temporal_patch_size",
        "merge_size": "spatial_merge_size",
    }
    for own, other in pairs.items():
        if own in made and vision.get(other) not in (None, made[own]):
            key, expected = f"{path}: {PROCESSOR}: {own}", f"{vision[other]}, as {other} of the model's vision_config"
            raise ModelError(key, made[own], expected, way_out)
    if "max_image_size" in made and made["max_image_size"]["longest_edge"] != vision["image_size"]:
        side = made["max_image_size"]["longest_edge"]
        expected = f"those of image_size={vision['image_size']} in the model's vision_config"
        raise ModelError(f"{path}: {PROCESSOR}", f"cuts tiles of {side} pixels", expected, way_out)
