# SPDX-License-Identifier: Apache-2.0
"""New model folders: random weights, a freshly trained tokenizer, a chat template.

For quickstarts, tests and benchmarks on machines without access to a model hub. The folders load with plain
`AutoModelForCausalLM` (of a model that reads images `AutoModelForImageTextToText` and `AutoImageProcessor`) and
`AutoTokenizer`; equal arguments write equal bytes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeGuard, cast, get_args

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from whet.errors import ConfigError
from whet.keyed import key
from whet.models.encoders.images import VIDEO_PROCESSOR
from whet.models.load import without_weight_bars

logger = logging.getLogger(__name__)

Fields = dict[str, Any]  # of a model's config
VisionArch = Literal["qwen2_vl", "qwen2.5_vl", "qwen3_vl", "smolvlm"]
MERGE, TIMES = 2, 2  # patches on a side of a token; frames of a time
LARGEST = 256  # tokens of an image or a frame
SIDE, CUTS = 4, 2  # SmolVLM: patches on a side of a tile, and tiles on a side of an image
TEXT_ONLY = """{%- if part.type != 'text' %}{{- raise_exception('this model reads text only') }}{%- endif %}
            {{- part.text }}"""


@dataclass(frozen=True)
class Markers:
    """The special tokens of an architecture that replace or enclose images and videos in the text."""

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

TextArch = Literal[
    "qwen2.5", "qwen3", "qwen3_moe", "llama", "mistral", "gemma", "gemma2", "phi",
    "gpt_oss", "deepseek_v2", "deepseek_v3", "qwen3_next", "qwen3_5",
]  # fmt: skip
Arch = TextArch | VisionArch
ARCHS = (*get_args(TextArch), *get_args(VisionArch))

# ChatML. Later messages never change how an earlier one is rendered, so sampled tokens stay the same over many turns.
# Tool results are put into a user turn, as in Qwen's templates.
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
SAMPLE_TEXT = Path(__file__).with_name("sample_text.txt").read_text(encoding="utf-8")

END_OF_TEXT, END_OF_TURN, START_OF_TURN = "<|endoftext|>", "<|im_end|>", "<|im_start|>"
_TEMPLATE_WORDS = ("system", "user", "assistant", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_ROWS_MULTIPLE = 8  # of embedding rows, for fast matrix products
_SPECIAL = (END_OF_TEXT, END_OF_TURN, START_OF_TURN)


@dataclass(frozen=True)
class ModelSize:
    """The shape of a model. Fixed: 3 x hidden as intermediate size, hidden / head_dim heads, half as many KV heads."""

    num_layers: int
    hidden_size: int
    head_dim: int
    vocab_size: int


SIZES = {
    "nano": ModelSize(num_layers=4, hidden_size=128, head_dim=32, vocab_size=512),  # 0.8 M parameters
    "tiny": ModelSize(num_layers=4, hidden_size=256, head_dim=64, vocab_size=512),  # 3.3 M
    "small": ModelSize(num_layers=8, hidden_size=512, head_dim=64, vocab_size=4096),  # 27 M
    "base": ModelSize(num_layers=28, hidden_size=1024, head_dim=64, vocab_size=32768),  # 390 M
}


def init_model(
    out: Path | str,
    arch: Arch = "qwen3",
    size: str = "tiny",
    *,
    vocab_size: int | None = None,
    seed: int = 0,
    texts: Iterable[str] | None = None,
    alphabet: str | None = None,
    hidden_size: int | None = None,
    num_layers: int | None = None,
    max_position_embeddings: int = 32768,
    patch_size: int = 14,
) -> Path:
    """Writes a model folder with random weights to `out` and returns its path.

    The tokenizer is a byte-level BPE trained on `texts` (default: a built-in sample). With `alphabet` it instead has
    one token for each of these characters and for each word of the chat template, and rejects other characters.
    `vocab_size` is the number of embedding rows, and the limit of the tokenizer. By default it is the number of tokens,
    limited by `size`, rounded up to a multiple of 8. `patch_size` is in pixels, for models that read images; 2 x 2
    patches make a token.  Raises: ConfigError."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        change = "choose another path, or remove it first"
        raise ConfigError(f"{out}", "exists and is not an empty folder", "", change)
    shape = _shape(arch, size, hidden_size, num_layers)
    special = MARKERS[arch].special if arch in MARKERS else ()
    if alphabet is not None:
        tokenizer = _alphabet_tokenizer(alphabet, arch, texts, special)
    else:
        texts = [SAMPLE_TEXT] if texts is None else texts
        tokenizer = _byte_level_tokenizer(texts, shape.vocab_size if vocab_size is None else vocab_size, special)
    tokenizer.chat_template = with_media(CHAT_TEMPLATE, arch) if _sees(arch) else CHAT_TEMPLATE
    num_rows = _num_rows(len(tokenizer), vocab_size)
    end_ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a link to nothing, a path below a file
        raise ConfigError(f"{out}", f"{error.strerror}", "a folder that can be made", "choose another path") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(seed, "init-model"))
        options = _options(shape, num_rows, {"max_position_embeddings": max_position_embeddings, **end_ids})
        if _sees(arch):
            model = vision_model(arch, options, tokenizer, shape.head_dim, patch_size)
        else:
            model = _random_model(cast(TextArch, arch), shape, options)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=list(end_ids.values()), pad_token_id=tokenizer.pad_token_id
    )
    with without_weight_bars():
        model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    if _sees(arch):
        save_processor(out, arch, patch_size)
    logger.info(
        "%s: %s with %.1f M parameters, %d embedding rows, %d tokens in the tokenizer",
        *(out, arch, model.num_parameters() / 1e6, num_rows, len(tokenizer)),
    )
    return out


def _sees(arch: Arch) -> TypeGuard[VisionArch]:
    return arch in MARKERS


def _shape(arch: str, size: str, hidden_size: int | None, num_layers: int | None) -> ModelSize:
    if arch not in ARCHS:
        raise ConfigError("arch", arch, f"one of {', '.join(ARCHS)}")
    if size not in SIZES:
        raise ConfigError("size", size, f"one of {', '.join(SIZES)}")
    shape = SIZES[size]
    shape = replace(
        shape,
        hidden_size=shape.hidden_size if hidden_size is None else hidden_size,
        num_layers=shape.num_layers if num_layers is None else num_layers,
    )
    if shape.num_layers < 1:
        raise ConfigError("num_layers", shape.num_layers, "at least 1")
    if shape.hidden_size < 1 or shape.hidden_size % (2 * shape.head_dim):
        expected = f"a multiple of {2 * shape.head_dim} (two heads of {shape.head_dim} share one KV head)"
        raise ConfigError("hidden_size", shape.hidden_size, expected)
    return shape


def _num_rows(num_tokens: int, vocab_size: int | None) -> int:
    if vocab_size is None:
        return -(-num_tokens // _ROWS_MULTIPLE) * _ROWS_MULTIPLE
    if vocab_size < num_tokens:
        raise ConfigError("vocab_size", vocab_size, f"at least the {num_tokens} tokens of the tokenizer", "raise it")
    if vocab_size > num_tokens:
        logger.warning(
            "the tokenizer has %d tokens: %d embedding rows stay unused", num_tokens, vocab_size - num_tokens
        )
    return vocab_size


def _options(shape: ModelSize, num_rows: int, options: Fields) -> Fields:
    num_heads = shape.hidden_size // shape.head_dim
    return {
        "vocab_size": num_rows,
        "hidden_size": shape.hidden_size,
        "intermediate_size": 3 * shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
        "dtype": "float32",
        **options,
    }


def _random_model(arch: TextArch, shape: ModelSize, options: Fields) -> PreTrainedModel:
    rope = options["rope_parameters"]
    head: Fields = {"head_dim": shape.head_dim}
    no_bos: Fields = {"bos_token_id": None}
    gemma = {
        **head,
        **no_bos,
        "query_pre_attn_scalar": shape.head_dim,
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(shape.num_layers)],
    }
    rank = {"kv_lora_rank": shape.head_dim, "q_lora_rank": 2 * shape.head_dim}
    sizes = {"qk_nope_head_dim": shape.head_dim, "qk_rope_head_dim": shape.head_dim // 2, "v_head_dim": shape.head_dim}
    heads = options["num_attention_heads"]
    latent = {**no_bos, **rank, **sizes, "num_key_value_heads": heads, "first_k_dense_replace": 1, "n_group": 2}
    latent |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "topk_group": 1, "n_shared_experts": 1}
    latent["moe_intermediate_size"] = 3 * shape.hidden_size // 4
    linear: Fields = {
        **head,
        "linear_num_key_heads": heads // 2,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": shape.head_dim,
        "linear_value_head_dim": shape.head_dim,
        "layer_types": [("linear_attention", "full_attention")[layer % 2] for layer in range(shape.num_layers)],
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 3 * shape.hidden_size // 4}
    two_ropes = {"full_attention": rope, "sliding_attention": {**rope, "rope_theta": 10_000.0}}
    # The special features of each architecture are kept: windows, caps, norms, fused and partly rotated projections.
    kinds: dict[TextArch, tuple[str, Fields]] = {
        "qwen2.5": ("qwen2", {}),
        "qwen3": ("qwen3", head),
        "qwen3_moe": ("qwen3_moe", {**head, **experts, "norm_topk_prob": True}),
        "llama": ("llama", {**head, **no_bos}),
        "mistral": ("mistral", {**head, **no_bos, "sliding_window": 4096}),
        "phi": ("phi3", {**no_bos, "rope_parameters": {**rope, "partial_rotary_factor": 0.75}}),
        "gpt_oss": (
            "gpt_oss",
            {**head, **no_bos, "num_local_experts": 8, "num_experts_per_tok": 2, "layer_types": gemma["layer_types"]}
            | {"intermediate_size": experts["moe_intermediate_size"], "sliding_window": 128},
        ),
        "deepseek_v2": ("deepseek_v2", {**latent, "topk_method": "group_limited_greedy"}),
        "deepseek_v3": ("deepseek_v3", latent),
        "qwen3_next": ("qwen3_next", {**linear, **experts, "shared_expert_intermediate_size": shape.hidden_size}),
        "qwen3_5": ("qwen3_5_text", linear),
        "gemma2": ("gemma2", {**gemma, "sliding_window": 4096}),
        "gemma": ("gemma3_text", {**gemma, "sliding_window": 1024, "rope_parameters": two_ropes}),
    }
    kind, own = kinds[arch]
    config = AutoConfig.for_model(kind, **{**options, **own})
    return cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, trust_remote_code=False))


def _byte_level_tokenizer(
    texts: Iterable[str], vocab_size: int, special: tuple[str, ...] = ()
) -> PreTrainedTokenizerBase:
    """Trains a BPE with Qwen's splitting (single digits) and Qwen's class, so that transformers can reload it."""
    num_special = len(_SPECIAL) + len(special)
    if vocab_size < 256 + num_special:
        expected = f"at least {256 + num_special}: 256 bytes and {num_special} special tokens of a byte-level tokenizer"
        raise ConfigError("vocab_size", vocab_size, expected, "raise it, or give an alphabet")
    more = [START_OF_TURN, *special]
    untrained = Qwen2Tokenizer(
        eos_token=END_OF_TURN, pad_token=END_OF_TEXT, unk_token=END_OF_TEXT, extra_special_tokens=more
    )
    trained = untrained.train_new_from_iterator(texts, vocab_size, show_progress=False)  # type: ignore[no-untyped-call]
    return cast(PreTrainedTokenizerBase, trained)


def _alphabet_tokenizer(
    alphabet: str, arch: Arch, texts: Iterable[str] | None, more: tuple[str, ...] = ()
) -> PreTrainedTokenizerBase:
    if arch == "qwen2.5":
        expected = "another one with an alphabet, such as qwen3: transformers loads every tokenizer of qwen2.5 as a "
        raise ConfigError("arch", arch, f"{expected}byte-level BPE, which silently drops unknown characters")
    if texts is not None:
        found = "both are given, but an alphabet is the whole vocabulary"
        raise ConfigError("alphabet and texts", found, "", "remove one of them")
    special = [*_SPECIAL, *more]
    tokens = [*special, *_TEMPLATE_WORDS, *sorted({*alphabet, "\n"})]  # the template writes newlines too
    # The unknown token is not in the vocabulary, so that an unknown character is an error.
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<|unknown|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(word, normalized=False) for word in _TEMPLATE_WORDS])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[START_OF_TURN, *more],
    )


def with_media(template: str, arch: VisionArch) -> str:
    """Returns the chat template, extended by content parts for the media that the architecture reads."""
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
    arch: VisionArch, text: Fields, tokenizer: PreTrainedTokenizerBase, head_dim: int, patch_size: int
) -> PreTrainedModel:
    """Returns a vision model with random weights. Its tower has the text model's depth and heads, and 3/4 its width."""
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
    classes: dict[str, tuple[Any, Any, Fields]] = {
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


def _smolvlm(text: Fields, tokenizer: PreTrainedTokenizerBase, width: int, patch_size: int) -> PreTrainedModel:
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
    sizes: Fields = {"patch_size": patch_size, "merge_size": MERGE, "temporal_patch_size": TIMES}
    size = {"shortest_edge": token, "longest_edge": LARGEST * token}
    processor = Qwen2VLImageProcessorPil(**sizes, size=size)
    processor.save_pretrained(out)
    kind = "Qwen3VLVideoProcessor" if arch == "qwen3_vl" else "Qwen2VLVideoProcessor"
    normal = {name: processor.to_dict()[name] for name in ("image_mean", "image_std")}
    video = {"video_processor_type": kind, **sizes, **normal, "size": size}
    (out / VIDEO_PROCESSOR).write_text(json.dumps(video, indent=2) + "\n")
