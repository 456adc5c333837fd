# SPDX-License-Identifier: Apache-2.0
"""Adapters of every kind of models: off they change nothing, merged they give the numbers of the adapted model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.nano import NANO, config_of, whet_log_probs
from tests.raising import raises
from whet.config.schema import LoraConfig
from whet.errors import ModelError
from whet.models.load import load_policy
from whet.models.lora import adapted_layers, add_adapter, merged_weights, plain_copy

IDS = torch.tensor([[11, 14, 12, 20, 5, 6, 9]])
FAST = ("glm4_moe", "phimoe", "jamba", "gemma3n_text")
KINDS = [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in NANO]


def random_folder(path: Path, model_type: str) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(model_type)).save_pretrained(path)
    return path


@torch.no_grad()
@pytest.mark.parametrize("model_type", KINDS)
def test_merged_weights_give_the_numbers_of_the_adapted_model(model_type: str, tmp_path: Path) -> None:
    model = load_policy(random_folder(tmp_path, model_type)).eval()
    start = whet_log_probs(model, IDS)
    add_adapter(model, LoraConfig(rank=4), seed=1)
    assert torch.equal(whet_log_probs(model, IDS), start)  # B is 0
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.normal_(std=0.1)
    moved, plain, merged = whet_log_probs(model, IDS), plain_copy(model), dict(merged_weights(model))
    own = dict(plain.named_parameters())
    assert merged.keys() == own.keys()
    for name, weight in merged.items():
        own[name].copy_(weight)
    torch.testing.assert_close(whet_log_probs(plain, IDS), moved, atol=1e-5, rtol=0)
    assert (moved - start).abs().max() > 1e-3


def test_layers_with_the_names_of_experts_are_not_adapted(tmp_path: Path) -> None:
    """The first layer of this model is dense, the second has shared experts. peft would adapt the routed experts in the
    place of both: an adapter's folder names only the last parts of layers."""
    model = load_policy(random_folder(tmp_path, "glm4_moe"))
    add_adapter(model, LoraConfig(rank=4), seed=1)
    assert {name.rpartition(".")[2] for name in adapted_layers(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_the_weights_of_experts_are_no_target(tmp_path: Path) -> None:
    model = load_policy(random_folder(tmp_path, "qwen3_moe"))
    with raises(ModelError, "model.lora.target_modules", found=re.compile("experts.gate_up_proj.*experts")):
        add_adapter(model, LoraConfig(rank=4, target_modules=["experts.gate_up_proj"]), seed=1)


@pytest.mark.parametrize("target", ["shared_experts.down_proj", "down_proj"])
def test_a_linear_layer_with_the_name_of_experts_is_no_target_either(target: str, tmp_path: Path) -> None:
    model = load_policy(random_folder(tmp_path, "glm4_moe"))
    with raises(ModelError, "model.lora.target_modules", found=re.compile(f"{target}.*peft")):
        add_adapter(model, LoraConfig(rank=4, target_modules=[target]), seed=1)


def test_the_output_of_a_state_space_is_no_target(tmp_path: Path) -> None:
    model = load_policy(random_folder(tmp_path, "jamba"))
    with raises(ModelError, "model.lora.target_modules", found=re.compile("out_proj.*kernel")):
        add_adapter(model, LoraConfig(rank=4, target_modules=["out_proj"]), seed=1)


@torch.no_grad()
def test_the_output_of_linear_attention_is_adapted_if_it_is_named(tmp_path: Path) -> None:
    """By default it is not: checkpoints of earlier runs have no adapter there."""
    plain, model = (load_policy(random_folder(tmp_path, "qwen3_5_text")).eval() for _ in range(2))
    add_adapter(plain, LoraConfig(rank=4), seed=1)
    assert not any(name.endswith("out_proj") for name in adapted_layers(plain))
    start = whet_log_probs(model, IDS)
    add_adapter(model, LoraConfig(rank=4, target_modules=["out_proj"]), seed=1)
    assert {name.rpartition(".")[2] for name in adapted_layers(model)} == {"out_proj"}
    for layer in adapted_layers(model).values():
        layer.lora_B["default"].weight.normal_(std=0.1)
    moved, merged = whet_log_probs(model, IDS), plain_copy(model)
    own = dict(merged.named_parameters())
    for name, weight in merged_weights(model):
        own[name].copy_(weight)
    assert (moved - start).abs().max() > 1e-3
    torch.testing.assert_close(whet_log_probs(merged, IDS), moved, atol=1e-5, rtol=0)
