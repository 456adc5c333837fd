# SPDX-License-Identifier: Apache-2.0
"""New models that read images, for `init_model`: random weights, the tokens of images, the files of the processor."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from whet.models.encoders.images import VIDEO_PROCESSOR

VisionArch = Literal["qwen2_vl", "qwen2.5_vl", "qwen3_vl", "smolvlm"]
MERGE, TIMES = 2, 2  # patches on a side of a token; frames of a time
LARGEST = 256  # tokens of an image or a frame
SIDE, CUTS = 4, 2  # SmolVLM: patches on a side of a tile, and tiles on a side of an image
TEXT_ONLY = """{%- if part.type != 'text' %}{{- raise_exception('this model reads text only') }}{%- endif %}
            {{- part.text }}"""


@dataclass(frozen=True)
class Markers:
    """The special tokens of an architecture that stand for images and videos, and around them."""

    special: tuple[str, ...]
    in_template: dict[str, str]  # by kind of part


_QWEN = Markers(
    ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")},
)
_SMOL = Markers(
    (
        *("<image>", "<video>", "<fake_token_around_image>", "<global-img>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, CUTS + 1) for column in range(1, CUTS + 1)),
    ),
    {kind: f"<{kind}>" for kind in ("image", "video")},
)
MARKERS: dict[str, Markers] = {**dict.fromkeys(("qwen2_vl", "qwen2.5_vl", "qwen3_vl"), _QWEN), "smolvlm": _SMOL}


def with_media(template: str, arch: VisionArch) -> str:
    """The chat template with parts of the kinds that the architecture reads."""
    found = MARKERS[arch].in_template
    cases = "".join(
        f"{{%- {'elif' if place else 'if'} part.type == '{kind}' %}}{{{{- '{text}' }}}}"
        for place, (kind, text) in enumerate(found.items())
    )
    reads = " and ".join(("text", *(f"{kind}s" for kind in found)))
    other = f"{{{{- raise_exception('this model reads {reads} only') }}}}"
    assert TEXT_ONLY in template
    return template.replace(
        TEXT_ONLY, f"{cases}{{%- elif part.type == 'text' %}}{{{{- part.text }}}}{{%- else %}}{other}{{%- endif %}}"
    )


def vision_model(
    arch: VisionArch, text: dict[str, Any], tokenizer: PreTrainedTokenizerBase, head_dim: int, patch_size: int
) -> PreTrainedModel:
    """A model with random weights. Its tower has as many layers and heads as the text, and 3/4 of its width."""
    hidden, layers, heads = text["hidden_size"], text["num_hidden_layers"], text["num_attention_heads"]
    width = 3 * hidden // 4
    if arch == "smolvlm":
        return _smolvlm(text, tokenizer, width, patch_size)
    rope = {**text["rope_parameters"], "mrope_section": [head_dim // 8, 3 * head_dim // 16, 3 * head_dim // 16]}
    text = {**text, "rope_parameters": rope, "bos_token_id": None}
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {"vision_start_token_id": "vision_start", "vision_end_token_id": "vision_end"}
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}
    own = {"depth": layers, "num_heads": heads, "patch_size": patch_size}
    own |= {"spatial_merge_size": MERGE, "temporal_patch_size": TIMES}
    gated = {"hidden_size": width, "intermediate_size": 2 * width, "out_hidden_size": hidden}
    window = {"window_size": 4 * patch_size * MERGE, "fullatt_block_indexes": [layers - 1], "tokens_per_second": 2}
    deep = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    classes: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "qwen2_vl": (
            Qwen2VLForConditionalGeneration,
            Qwen2VLConfig,
            {"embed_dim": width, "hidden_size": hidden, "mlp_ratio": 2, "in_chans": 3},  # which SGLang reads
        ),
        "qwen2.5_vl": (Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig, {**gated, **window}),
        "qwen3_vl": (Qwen3VLForConditionalGeneration, Qwen3VLConfig, {**gated, **deep}),
    }
    model, config, special = classes[arch]
    if arch == "qwen3_vl":  # transformers interleaves always, vLLM and SGLang where the config says so
        text |= {"head_dim": head_dim, "rope_parameters": {**rope, "mrope_interleaved": True}}
    shared = {name: text[name] for name in ("tie_word_embeddings", "dtype", "eos_token_id", "pad_token_id")}
    made = config(text_config=text, vision_config={**own, **special}, **ids, **shared)
    return cast(PreTrainedModel, model(made))


def _smolvlm(text: dict[str, Any], tokenizer: PreTrainedTokenizerBase, width: int, patch_size: int) -> PreTrainedModel:
    tower = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": text["num_hidden_layers"],
        "num_attention_heads": text["num_attention_heads"],
        "image_size": SIDE * patch_size,
        "patch_size": patch_size,
    }
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids("<image>"), "pad_token_id": text["pad_token_id"]}
    text = {"model_type": "llama", "bos_token_id": None, **text}
    tied = {"tie_word_embeddings": True, "dtype": text["dtype"], "eos_token_id": text["eos_token_id"]}
    config = SmolVLMConfig(text_config=text, vision_config=tower, scale_factor=MERGE, **ids, **tied)  # type: ignore[arg-type]
    return cast(PreTrainedModel, SmolVLMForConditionalGeneration(config))


def save_processor(out: Path, arch: VisionArch, patch_size: int) -> None:
    """Writes the files of the image processor, and of the video processor that vLLM and SGLang read."""
    if arch == "smolvlm":
        side = SIDE * patch_size
        tile, whole = {"longest_edge": side}, {"longest_edge": CUTS * side}
        SmolVLMImageProcessorPil(size=whole, max_image_size=tile).save_pretrained(out)
        tokens = {"processor_class": "SmolVLMProcessor", "image_seq_len": (SIDE // MERGE) ** 2}
        (out / "processor_config.json").write_text(json.dumps(tokens, indent=2) + "\n")
        return
    token = (patch_size * MERGE) ** 2
    sizes: dict[str, Any] = {"patch_size": patch_size, "merge_size": MERGE, "temporal_patch_size": TIMES}
    size = {"shortest_edge": token, "longest_edge": LARGEST * token}
    processor = Qwen2VLImageProcessorPil(**sizes, size=size)
    processor.save_pretrained(out)
    kind = "Qwen3VLVideoProcessor" if arch == "qwen3_vl" else "Qwen2VLVideoProcessor"
    normal = {name: processor.to_dict()[name] for name in ("image_mean", "image_std")}
    video = {"video_processor_type": kind, **sizes, **normal, "size": size}
    (out / VIDEO_PROCESSOR).write_text(json.dumps(video, indent=2) + "\n")
