# SPDX-License-Identifier: Apache-2.0
"""Folders of models with four layers and random weights, one of each family that the engine knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
STRETCHED = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MIXED = {"num_experts_per_tok": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    # name: (class of transformers, what its config has beside SIZES)
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "llama": ("Llama", {"rope_parameters": STRETCHED}),
    "qwen3_moe": ("Qwen3Moe", {**MIXED, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}),
    "mixtral": ("Mixtral", {**MIXED, "num_local_experts": 4}),
}


def folder_of(kind: str, root: Path) -> Path:
    """Writes a model whose norms and biases are not at their start."""
    import torch
    import transformers

    name, own = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES, **own)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight)) if weight.dim() == 1 else weight.mul_(4)
    model.save_pretrained(root / kind)
    return root / kind
