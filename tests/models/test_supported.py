# SPDX-License-Identifier: Apache-2.0
"""Models that mix tokens otherwise than by causal attention are refused when they are loaded, with the part named."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.raising import raises
from whet.errors import ModelError
from whet.models import attention, fused
from whet.models.load import context_length, load_policy, outline
from whet.models.supported import check_supported

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "n_routed_experts": 8, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}


def folder_of(path: Path, model_type: str, **changed: Any) -> Path:
    config = AutoConfig.for_model(model_type, **(SMALL | changed))
    config.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("model_type", "changed", "part"),
    [
        ("deepseek_v32", {**EXPERTS, **LATENT, "num_key_value_heads": 4}, "indexed_attention"),
        ("kimi_linear", {**EXPERTS, **LATENT}, "linear_attention|linear attention"),
        ("llama4_text", {**EXPERTS, "head_dim": 8, "intermediate_size_mlp": 32}, "chunked_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "conv"),
        ("jamba", {**EXPERTS, "attn_layer_period": 4, "attn_layer_offset": 2, "use_mamba_kernels": False}, "conv"),
        ("diffllama", {}, "layers 0, 0, 1, 1, 2, 2, 3, 3"),
        ("stablelm", {}, "nowhere"),
        ("bloom", {"n_layer": 2}, "nowhere"),
        ("falcon", {}, "cannot replace"),
        ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, "cannot replace"),
        ("roberta", {}, "both directions"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_its_part(
    model_type: str, changed: dict[str, Any], part: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "model", model_type, **changed)
    with raises(ModelError, f"{folder}", found=re.compile(part)), torch.device("meta"):
        outline(folder)


@pytest.mark.parametrize(
    ("model_type", "missing"),
    [
        ("mamba", "max_position_embeddings"),
        ("rwkv", "num_attention_heads"),
        ("t5", "max_position"),
        ("bloom", "max_pos"),
    ],
)
def test_a_config_without_attention_over_positions_is_refused_before_its_rows_are_read(
    model_type: str, missing: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    for read in (context_length, load_policy):
        with raises(ModelError, f"{tmp_path}", found=re.compile(missing)):
            read(tmp_path)


def test_it_is_refused_with_its_weights_too(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "llama4_text", **EXPERTS, head_dim=8, intermediate_size_mlp=32)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    with raises(ModelError, f"{folder}", found=re.compile("chunked_attention")):
        load_policy(folder)


@pytest.mark.parametrize(
    ("model_type", "changed"),
    [
        ("gpt2", {"n_embd": 32, "n_layer": 10, "n_head": 4, "num_key_value_heads": 4}),
        ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 32, "num_key_value_heads": 4}),
        ("granitemoe", EXPERTS),
        ("gpt_oss", {**EXPERTS, "head_dim": 8}),
        ("qwen3_next", EXPERTS),
        ("qwen3_5_text", {}),
        ("olmo_hybrid", {}),
        ("deepseek_v3", {**EXPERTS, **LATENT, "num_key_value_heads": 4}),
        ("deepseek_v2", {**EXPERTS, **LATENT, "num_key_value_heads": 4}),
        ("cohere2", {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}),
        ("glm4_moe", {**EXPERTS, "head_dim": 8, "n_group": 1, "topk_group": 1}),
    ],
)
def test_other_causal_models_are_taken(model_type: str, changed: dict[str, Any], tmp_path: Path) -> None:
    with torch.device("meta"):
        outline(folder_of(tmp_path / "model", model_type, **changed))


def test_a_norm_that_needs_more_than_its_rows_is_not_replaced() -> None:
    class GatedNorm(torch.nn.Module):
        variance_epsilon = 1e-6

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return x * self.weight * gate

    assert fused.fuse(torch.nn.Sequential(GatedNorm())) == 0


@pytest.mark.parametrize(("model_type", "coefficient"), [("qwen3_moe", 0.25), ("mixtral", 0.5)])
def test_the_loss_of_a_router_is_left_out_with_a_line(
    model_type: str, coefficient: float, caplog: pytest.LogCaptureFixture
) -> None:
    for asks in (False, True):
        config = AutoConfig.for_model(
            model_type, **SMALL, **EXPERTS, router_aux_loss_coef=coefficient, output_router_logits=asks
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
        caplog.clear()
        check_supported(model, "there")
        args = [record.args for record in caplog.records]
        assert args == [("there", coefficient)] * asks


def test_the_check_leaves_no_reference_to_the_weights() -> None:
    """A parameter with one, kept for a while by a cycle, cannot be moved to a device of another kind."""
    config = AutoConfig.for_model("qwen3", **(SMALL | {"hidden_size": 48}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    gc.disable()
    try:
        check_supported(model, "there")
        assert [name for name, each in model.named_parameters() if weakref.getweakrefs(each)] == []
    finally:
        gc.enable()
