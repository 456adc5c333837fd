# SPDX-License-Identifier: Apache-2.0
"""Shapes of Qwen2.5, work for them, and folders of random models; read by the environments of vLLM and TRL too."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

VOCABULARY, TINY_VOCABULARY = 151_936, 512
SHAPES = {  # hidden, layers, heads, heads of keys, intermediate
    "tiny": (128, 2, 4, 2, 256),
    "0.5b": (896, 24, 14, 2, 4864),
    "1.5b": (1536, 28, 12, 2, 8960),
    "7b": (3584, 28, 28, 4, 18944),
}
SAMPLES = 8
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPTS = {"tiny": 4, "7b": 32}  # else 64


def config_of(size: str) -> Qwen2Config:
    """A shape of Qwen2.5."""
    hidden, layers, heads, kv_heads, inner = SHAPES[size]
    return Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocabulary(size),
        max_position_embeddings=32_768,
        tie_word_embeddings=size != "7b",
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        use_sliding_window=False,
    )


def vocabulary(size: str) -> int:
    """Its tokens."""
    return TINY_VOCABULARY if size == "tiny" else VOCABULARY


def longest(size: str) -> int:
    """The most tokens of a response."""
    return 80 if size == "tiny" else 1024


def workload(size: str, prompts: int, n: int = SAMPLES) -> list[tuple[tuple[int, ...], int]]:
    """Prompts of 64 to 256 random tokens, n samples each, every one with its own length of 64 to 1,024."""
    draw, most = random.Random(0), 500 if size == "tiny" else 150_000
    texts = [tuple(draw.randrange(10, most) for _ in range(draw.randint(64, 256))) for _ in range(prompts)]
    lengths = [draw.randint(64, longest(size)) for _ in range(prompts * n)]
    return [(text, length) for text, length in zip((t for t in texts for _ in range(n)), lengths, strict=True)]


def folder_of(size: str, parent: Path) -> Path:
    """A model with random weights in bfloat16, without a tokenizer; made once."""
    folder = parent / size
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16)
        model.save_pretrained(folder)
    return folder


def rows_of(size: str) -> list[dict[str, str]]:
    """The prompts of a step as text; a letter is a token at the most."""
    prompts = [prompt for prompt, _ in workload(size, PROMPTS.get(size, 64), 1)]
    return [{"prompt": "".join(LETTERS[each % len(LETTERS)] for each in ids), "answer": ""} for ids in prompts]


def score(text: str) -> float:
    """A reward that differs between answers."""
    return float(sum(map(ord, text)) % 7)


def add(out: Path | None, part: str, **figures: Any) -> None:
    """Prints the figures of a part, and appends them to a file."""
    line = json.dumps({"part": part, **figures})
    print(line, flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
