# SPDX-License-Identifier: Apache-2.0
"""Finds how a model reads images and videos: the table of families, and the files of its processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoImageProcessor, BaseImageProcessor, PreTrainedModel
from transformers.utils import cached_file

from whet.errors import ModelError
from whet.models.folder import reading
from whet.models.vision.base import Vision, body_of
from whet.models.vision.qwen import Qwen3Vision, QwenVision
from whet.models.vision.tiles import Gemma3Vision, InternVision, SmolVision

FAMILIES: dict[str, type[Any]] = {
    "qwen2_vl": QwenVision,
    "qwen2_5_vl": QwenVision,
    "qwen3_vl": Qwen3Vision,
    "qwen3_vl_moe": Qwen3Vision,
    "smolvlm": SmolVision,
    "internvl": InternVision,
    "gemma3": Gemma3Vision,
}
PROCESSOR, VIDEO_PROCESSOR, TOGETHER = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


def sees(config: Any) -> bool:
    """True for the config of a model that reads images."""
    return config.model_type in FAMILIES


def load_vision(path: str | Path, config: Any, *, trust_remote_code: bool = False) -> Vision | None:
    """Loads how the model at `path`, with this transformers config, reads images; None for a text model.

    Needs no weights.  Raises: ModelError where the files of its image processor are missing or do not fit the model.
    """
    if not sees(config):
        return None
    files = {
        name: content for name in (PROCESSOR, VIDEO_PROCESSOR, TOGETHER) if (content := _read(path, name)) is not None
    }
    together = files.get(TOGETHER, {})
    own = files.get(PROCESSOR) or together.get("image_processor")
    if own is None:
        problem = f"is a model that reads images ({config.model_type}) without {PROCESSOR}"
        raise ModelError(f"{path}", problem, "", "copy this file from the folder that the model comes from")
    with reading(path, f"has a {PROCESSOR} that transformers cannot load"):
        processor: BaseImageProcessor = AutoImageProcessor.from_pretrained(
            path, backend="pil", trust_remote_code=trust_remote_code
        )
    _check_fits(path, config, processor)
    found: Vision = FAMILIES[config.model_type](config, processor, files)
    return found


def attach(thing: Any, vision: Vision | None) -> None:
    """Gives `vision` to a tokenizer or to the body of a model, where `vision_of` finds it."""
    (body_of(thing) if isinstance(thing, nn.Module) else thing).vision = vision


def vision_of(thing: Any) -> Vision | None:
    """The vision of a model from `load_policy`, or of the model of a tokenizer from `load_tokenizer`; or None."""
    if isinstance(thing, nn.Module):
        thing = thing.base_model if isinstance(thing, PreTrainedModel) else getattr(thing, "body", None)
    found = getattr(thing, "vision", None)
    return found if isinstance(found, Vision) else None


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


def _check_fits(path: str | Path, config: Any, processor: Any) -> None:
    """Checks that the processor is the family's, and that the sizes of patches agree.  Raises: ModelError."""
    expected, found = FAMILIES[config.model_type].processor_name, type(processor).__name__
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
