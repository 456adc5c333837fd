# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family, made from their configs, and pictures."""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image, ImageDraw
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from whet.types import Media

MADE = {"qwen2_vl": "qwen2_vl", "qwen2_5_vl": "qwen2.5_vl", "qwen3_vl": "qwen3_vl", "smolvlm": "smolvlm"}
FAMILIES = (*MADE, "qwen3_vl_moe", "internvl", "gemma3", "llava_onevision")
OF_TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_TEXT |= {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0}
MARKS = ["<IMG_CONTEXT>", "<img>", "</img>", "<image_soft_token>", "<start_of_image>", "<end_of_image>"]
MARKS += ["<image>", "<video>"]
PLACES = {"internvl": "<IMG_CONTEXT>", "gemma3": "<start_of_image>", "llava_onevision": "<image>"}  # of an image
OF_TEXT |= {"vocab_size": 520, "bos_token_id": None, "eos_token_id": 1}
OF_TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a tiny model of a family, by its model type."""

    @cache
    def make(family: str) -> Path:
        out = tmp_path_factory.mktemp("models") / family
        if family in MADE:
            from whet.plugins.lessons.init_model import init_model

            return init_model(out, MADE[family], "nano", num_layers=2, patch_size=8)  # type: ignore[arg-type]
        return built(out, family, make("qwen3_vl"))

    return make


def built(out: Path, family: str, qwen: Path) -> Path:
    """A model from its config, with the tokenizer of the Qwen3-VL at `qwen` and more tokens."""
    tokens = transformers.AutoTokenizer.from_pretrained(qwen)
    tokens.add_tokens(MARKS, special_tokens=True)  # 512 to 519
    torch.manual_seed(0)
    if family in PLACES:  # a chat template that writes the family's own placeholders
        for kind, place in {"image": PLACES[family], "video": "<video>"}.items():
            old = f"<|vision_start|><|{kind}_pad|><|vision_end|>"
            tokens.chat_template = tokens.chat_template.replace(old, place)
    model, processor = BUILT[family](qwen)
    for part in (model, tokens, processor):
        part.save_pretrained(out)
    return out


def _moe(qwen: Path) -> tuple[Any, Any]:
    config = transformers.AutoConfig.from_pretrained(qwen).to_dict()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    text = {**config["text_config"], **experts, "vocab_size": 520, "model_type": "qwen3_vl_moe_text"}
    tower = {**config["vision_config"], "model_type": "qwen3_vl_moe_vision"}
    kept = {name: value for name, value in config.items() if name.endswith("token_id")}
    made = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=tower, **kept)
    processor = transformers.AutoImageProcessor.from_pretrained(qwen, backend="pil")
    return transformers.Qwen3VLMoeForConditionalGeneration(made), processor


def _intern(qwen: Path) -> tuple[Any, Any]:
    config = transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **OF_TEXT},
        vision_config={**OF_TOWER, "image_size": [32, 32], "patch_size": [8, 8]},
        image_token_id=512,
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    size = {"height": 32, "width": 32}
    processor = GotOcr2ImageProcessorPil(size=size, crop_to_patches=False, min_patches=1, max_patches=6)
    return transformers.InternVLForConditionalGeneration(config), processor


def _gemma(qwen: Path) -> tuple[Any, Any]:
    config = transformers.Gemma3Config(
        text_config={**OF_TEXT, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={**OF_TOWER, "image_size": 32, "patch_size": 8, "vision_use_head": False},
        mm_tokens_per_image=4,
        image_token_id=515,
        boi_token_index=516,
        eoi_token_index=517,
    )
    processor = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    model = transformers.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)  # which begins as 0
    return model, processor


def _llava(qwen: Path) -> tuple[Any, Any]:
    grid = [[32, 32], [32, 64], [64, 32], [64, 64], [32, 96]]
    config = transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **OF_TEXT},
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False, **OF_TOWER}
        | {"image_size": 32, "patch_size": 8},
        image_token_index=518,
        video_token_index=519,
        image_grid_pinpoints=grid,
        vision_aspect_ratio="anyres_max_3",  # so that four tiles are reduced
    )
    size = {"height": 32, "width": 32}
    processor = LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=grid)
    return transformers.LlavaOnevisionForConditionalGeneration(config), processor


BUILT = {"qwen3_vl_moe": _moe, "internvl": _intern, "gemma3": _gemma, "llava_onevision": _llava}


def picture(seed: int, height: int, width: int) -> Image.Image:
    """A picture with three random figures."""
    draw = random.Random(seed)
    made = Image.new("RGB", (width, height), (250, 240, 230))
    for _ in range(3):
        left, top = draw.randrange(width), draw.randrange(height)
        colour = tuple(draw.randrange(256) for _ in range(3))
        ImageDraw.Draw(made).ellipse([left, top, left + width // 3, top + height // 3], fill=colour)
    return made


def png(image: Image.Image) -> bytes:
    """The bytes of a PNG file."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def image_of(made: Image.Image) -> Media:
    """An image as media."""
    return Media("image", hashlib.sha256(png(made)).hexdigest(), png(made))


def video_of(frames: Sequence[Image.Image]) -> Media:
    """A video as media."""
    source = tuple(png(frame) for frame in frames)
    return Media("video", hashlib.sha256(b"".join(source)).hexdigest(), source, tuple(range(len(frames))))


def text_of(media: Media) -> str:
    """The text that replaces the placeholder."""
    assert media.tokens is not None
    return "".join(piece * times for piece, times in media.tokens.text)
