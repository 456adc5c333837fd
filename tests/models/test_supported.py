# SPDX-License-Identifier: Apache-2.0
"""Models that mix tokens otherwise than by causal attention are computed by transformers' own forward."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.first import first
from tests.raising import raises
from whet.errors import ModelError
from whet.kernels import fused
from whet.models import attention, general
from whet.models.load import NO_LIMIT, context_length, load_policy, outline
from whet.models.supported import Support, lack_of, support_of

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
UNCOUNTED: dict[str, Any] = {"max_position_embeddings": ...}  # left out
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}


def folder_of(path: Path, model_type: str, **changed: Any) -> Path:
    values = {name: value for name, value in (SMALL | changed).items() if value is not ...}
    config = AutoConfig.for_model(model_type, **values)
    config.save_pretrained(path)
    return path


GENERAL: list[tuple[str, dict[str, Any], str]] = [
    ("deepseek_v32", {**EXPERTS, **LATENT, "num_key_value_heads": 4}, "indexed_attention"),
    ("llama4_text", {**EXPERTS, "head_dim": 8, "intermediate_size_mlp": 32}, "chunked_attention"),
    ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "conv"),
    ("jamba", {**EXPERTS, "attn_layer_period": 4, "attn_layer_offset": 2, "use_mamba_kernels": False}, "conv"),
    ("diffllama", {}, "layers 0, 0, 1, 1, 2, 2, 3, 3"),
    ("stablelm", {}, "nowhere"),
    ("bloom", {"n_layer": 2, "n_head": 4, **UNCOUNTED}, "no max_position_embeddings"),
    (
        "mamba",
        {"state_size": 4, **UNCOUNTED, "num_attention_heads": ...},
        "no num_attention_heads and no max_position_embeddings",
    ),
    ("falcon", {}, "cannot replace"),
    ("mpt", {"n_layers": 2, "n_heads": 4, "d_model": 32}, "bias by position"),
    ("modernbert-decoder", {}, "both sides"),
    ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, "cannot replace"),
]


@pytest.mark.parametrize(("model_type", "changed", "part"), GENERAL)
def test_a_model_of_another_kind_goes_the_general_way_for_its_part(
    model_type: str, changed: dict[str, Any], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(general, "checked_small", lambda model, path, lacks: Support(lacks))  # some would be refused
    folder = folder_of(tmp_path / "model", model_type, **changed)
    with torch.device("meta"):
        support = support_of(outline(folder))
    assert part in support.lacks and not support.is_own


@pytest.mark.parametrize("load", [outline, load_policy])
def test_an_encoder_is_refused(load: Callable[[Path], Any], tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "roberta")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    with raises(ModelError, f"{folder}", found=re.compile("both directions")), torch.device("cpu"):
        load(folder)


@pytest.mark.parametrize("model_type", ["qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"])
def test_linear_attention_alone_is_refused(model_type: str, tmp_path: Path) -> None:
    """transformers' cache and whet's ask a layer with keys for the number of tokens."""
    folder = folder_of(tmp_path, model_type, **EXPERTS, layer_types=["linear_attention"] * 4)
    with raises(ModelError, f"{folder}", found=re.compile("linear attention")), torch.device("meta"):
        outline(folder)


@pytest.mark.parametrize(
    ("model_type", "changed", "length"),
    [("mamba", UNCOUNTED, NO_LIMIT), ("bloom", UNCOUNTED, NO_LIMIT), ("llama", {}, 64)],
)
def test_a_model_without_positions_reads_rows_of_any_length(
    model_type: str, changed: dict[str, Any], length: int, tmp_path: Path
) -> None:
    assert context_length(folder_of(tmp_path, model_type, **changed)) == length


class _Changed(torch.nn.Module):
    """A body whose states are the changed states of another one."""

    def __init__(self, body: Any, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.change = body, change

    def forward(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
        out = self.body(input_ids=input_ids, **arguments)
        mask = arguments["attention_mask"]
        mask = torch.ones_like(input_ids) if mask is None else mask
        out["last_hidden_state"] = self.change(out.last_hidden_state, mask)
        return out


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda states, mask: states + states.flip(1), "later"),
        (lambda states, mask: states * (2 - mask.amin(1))[:, None, None], "padding"),
        (lambda states, mask: states * (mask[:, :1, None] + 1), ""),
    ],
)
def test_a_model_is_tried_when_it_is_loaded(
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], part: str, tmp_path: Path
) -> None:
    """The states of the first model read later tokens, the ones of the second read padding; padding on the left changes
    the third, so it samples rows of one length."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
    model.model = _Changed(model.model, change)
    if part:
        with raises(ModelError, "there", found=re.compile(part)):
            general.checked(model, "there", "a part")
    else:
        assert general.checked(model, "there", "a part") == Support("a part", pads_left=False)


@pytest.mark.parametrize(
    "model_type", first(1, ["lfm2", "mamba", "mpt", "modernbert-decoder"], others=pytest.mark.slow)
)
def test_on_meta_a_small_copy_decides_as_the_model_itself(model_type: str, tmp_path: Path) -> None:
    changed = next(changed for name, changed, _ in GENERAL if name == model_type)
    folder = folder_of(tmp_path, model_type, **changed)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    found = list[object]()
    for load, device in ((outline, "meta"), (load_policy, "cpu")):
        try:
            with torch.device(device):
                found.append(support_of(load(folder)))
        except ModelError as error:
            found.append((error.key, error.found))
    assert found[0] == found[1]
    assert isinstance(found[0], Support) == (model_type in ("lfm2", "mamba"))


def test_the_copy_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {"num_hidden_layers": 12, "layer_types": ["conv", "full_attention"] * 6, "vocab_size": 50000}
    folder, tried = folder_of(tmp_path, "lfm2", **layers, eos_token_id=49999), list[Any]()

    def checked(model: Any, path: object, lacks: str) -> Support:
        tried.append(model)
        return Support(lacks, caches=False)

    monkeypatch.setattr(general, "checked", checked)
    monkeypatch.setattr(general, "_TRIED", {})
    with torch.device("meta"):
        assert not support_of(outline(folder)).caches
        outline(folder)
    [copy] = tried  # once
    assert (len(copy.model.layers), copy.config.vocab_size, copy.config.eos_token_id) == (4, 64, 0)
    assert copy.device.type == "cpu" and copy.dtype == torch.float32
    monkeypatch.setattr(general, "_TRIED", {})
    monkeypatch.setattr(general, "LARGEST", 100)
    with torch.device("meta"):
        assert support_of(outline(folder)).caches and len(tried) == 1


@pytest.mark.parametrize(
    ("model_type", "changed"),
    first(
        3,
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
            (
                "cohere2",
                {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8},
            ),
            ("glm4_moe", {**EXPERTS, "head_dim": 8, "n_group": 1, "topk_group": 1}),
        ],
        others=pytest.mark.slow,
    ),
)
def test_other_causal_models_are_taken(model_type: str, changed: dict[str, Any], tmp_path: Path) -> None:
    with torch.device("meta"):
        assert support_of(outline(folder_of(tmp_path / "model", model_type, **changed))).is_own


def test_a_norm_that_needs_more_than_its_rows_is_not_replaced() -> None:
    class GatedNorm(torch.nn.Module):
        variance_epsilon = 1e-6

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return x * self.weight * gate

    assert fused.fuse(torch.nn.Sequential(GatedNorm())) == 0


def test_the_check_leaves_no_reference_to_the_weights() -> None:
    """A parameter with one, kept for a while by a cycle, cannot be moved to a device of another kind."""
    config = AutoConfig.for_model("qwen3", **(SMALL | {"hidden_size": 48}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.implementation(config))
    gc.disable()
    try:
        assert lack_of(model, "there") == ""
        assert [name for name, each in model.named_parameters() if weakref.getweakrefs(each)] == []
    finally:
        gc.enable()
