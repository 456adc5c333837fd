# SPDX-License-Identifier: Apache-2.0
"""Writes the start models and the data of the kept runs into the current folder, by the code of their commit.

The model `text` has 3,400 weights, `sees` 17,500: `whet init-model` makes none as small, so its models are built again,
narrower. The pictures are files, since a picture that is drawn again elsewhere may have other bytes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from whet.plugins.lessons.drawn.figures import counting
from whet.plugins.lessons.init_model import Arch, init_model

ALPHABET = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz<>?:."
WORDS = ["<calc>", "</calc>"]  # a token each, so that random weights learn to write them within seconds
SPREAD = 0.3  # of the weights: wide enough that other weights sample other tokens
NARROW = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16, "initializer_range": SPREAD}


def write_model(folder: Path, arch: Arch, **options: Any) -> None:
    """Writes a model folder of an alphabet's tokenizer and of random weights in one narrow layer."""
    made = init_model(folder, arch, "nano", alphabet=ALPHABET, num_layers=1, max_position_embeddings=128, **options)
    config: Any = AutoConfig.from_pretrained(made)
    sees = hasattr(config, "vision_config")
    text = config.text_config if sees else config
    tokenizer: Any = AutoTokenizer.from_pretrained(made)
    if not sees:
        tokenizer.add_tokens(WORDS)
        tokenizer.save_pretrained(made)
        text.head_dim = 8
    else:
        text.rope_parameters = {**text.rope_parameters, "mrope_section": [1, 1, 2]}
        for name, value in TOWER.items():
            setattr(config.vision_config, name, value)
    config.initializer_range = text.initializer_range = SPREAD
    for name, value in {**NARROW, "vocab_size": -(-len(tokenizer) // 8) * 8}.items():
        setattr(text, name, value)
    torch.manual_seed(0)
    model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_config(config)
    model.save_pretrained(made)
    sys.stdout.write(f"{folder}: {model.num_parameters():,} weights\n")


def write_rows(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows as JSON lines."""
    (Path("data") / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data() -> None:
    """Writes products to ask for, to imitate, and as calls of the calculator, pairs of answers, and pictures."""
    pairs = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    random.Random(0).shuffle(pairs)
    rows = [{"prompt": f"{a}*{b}=", "answer": str(a * b)} for a, b in pairs]
    write_rows("train", rows[:40])
    write_rows("held_out", rows[40:46])
    examples = [{"prompt": row["prompt"], "response": row["answer"]} for row in rows]
    write_rows("examples", examples[:40])
    write_rows("more_examples", examples[40:48])
    write_rows("calls", [{**row, "response": f"<calc>{row['prompt'][:-1]}</calc>"} for row in examples])
    chosen = [{"prompt": f"{a}*{b}=", "chosen": str(a * b), "rejected": str(a + b)} for a, b in pairs]
    write_rows("preferences", chosen[:40])
    pictures = []
    for number, row in enumerate(counting("train", 0, num_rows=12, pixels=32, grid=2, most=4, prompt="<image>?")):
        [drawn] = row["images"]
        (Path("data") / f"{number}.png").write_bytes(drawn)
        pictures.append({**row, "images": [f"{number}.png"]})
    write_rows("pictures", pictures)


if __name__ == "__main__":
    Path("data").mkdir()
    write_data()
    write_model(Path("models/text"), "qwen3")
    write_model(Path("models/sees"), "qwen2.5_vl", patch_size=8)
