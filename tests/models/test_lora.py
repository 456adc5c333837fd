# SPDX-License-Identifier: Apache-2.0
"""Adapters of every kind of models: off they change nothing, merged they give the numbers of the adapted model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.first import first
from tests.models.nano import NANO, config_of, whet_log_probs
from tests.raising import raises
from whet.config.schema import LoraConfig
from whet.errors import ModelError
from whet.kernels.compiled_layers import compile_layers
from whet.models.load import layers, load_policy
from whet.models.lora import (
    ADAPTER,
    adapted_layers,
    adapter_off,
    add_adapter,
    fingerprint,
    merged_weights,
    plain_copy,
    save_adapter,
)

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


EXPERTS = ("qwen3_moe", "glm4_moe", "gpt_oss")  # plain, beside shared experts, transposed with biases


@torch.no_grad()
@pytest.mark.parametrize("model_type", first(1, EXPERTS, others=pytest.mark.slow))
@pytest.mark.parametrize(
    "targets", first(1, [["experts"], ["q_proj", "experts.down_proj"]], others=pytest.mark.slow), ids=" ".join
)
def test_experts_are_adapted_if_they_are_named(model_type: str, targets: list[str], tmp_path: Path) -> None:
    """Off the adapter changes nothing; merged by whet, and by peft from a folder, it gives the adapted model."""
    model = load_policy(random_folder(tmp_path, model_type)).eval()
    start, base = whet_log_probs(model, IDS), fingerprint(model)
    add_adapter(model, LoraConfig(rank=4, target_modules=targets), seed=1)
    assert fingerprint(model) == base and torch.equal(whet_log_probs(model, IDS), start)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(".experts." in name or ".q_proj." in name for name in trained)
    assert any(".experts." in name for name in trained)
    for name, weight in trained.items():
        if "lora_B" in name:
            weight.normal_(std=0.1)
    moved, plain, merged = whet_log_probs(model, IDS), plain_copy(model), dict(merged_weights(model))
    own = dict(plain.named_parameters())
    assert merged.keys() == own.keys() == dict(load_policy(tmp_path).named_parameters()).keys()
    for name, weight in merged.items():
        own[name].copy_(weight)
    assert (moved - start).abs().max() > 1e-3
    torch.testing.assert_close(whet_log_probs(plain, IDS), moved, atol=1e-5, rtol=0)
    with adapter_off(model):
        assert torch.equal(whet_log_probs(model, IDS), start)
    config: Any = model.peft_config[ADAPTER]
    config.base_model_name_or_path = str(tmp_path)
    save_adapter(trained, config, tmp_path / "adapter")
    loaded = load_policy(tmp_path, adapter_path=str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(whet_log_probs(loaded, IDS), moved, atol=1e-5, rtol=0)


def test_the_adapter_of_an_expert_is_the_product_of_its_own_parts(tmp_path: Path) -> None:
    """A has a block of rows for each expert, B each rank's column of every expert: peft's form, here by hand."""
    model = load_policy(random_folder(tmp_path, "qwen3_moe"))
    name = next(name for name, weight in model.named_parameters() if name.endswith("experts.down_proj"))
    start = dict(model.named_parameters())[name].detach().clone()
    add_adapter(model, LoraConfig(rank=2, alpha=6.0, target_modules=["experts.down_proj"]), seed=1)
    layer = adapted_layers(model)[name.rpartition(".")[0]]
    first, second = layer.lora_A[ADAPTER].weight.detach(), layer.lora_B[ADAPTER].weight.detach()
    second.normal_(std=0.1)
    merged, count = dict(merged_weights(model))[name], len(start)
    for expert in range(count):
        columns = [expert, count + expert]
        by_hand = start[expert] + 3.0 * second[:, columns] @ first[2 * expert : 2 * expert + 2]
        torch.testing.assert_close(merged[expert], by_hand, atol=1e-6, rtol=0)


def test_layers_with_adapted_experts_are_not_compiled(tmp_path: Path) -> None:
    """peft makes a class in each pass, and torch would compile the layer again."""
    model = load_policy(random_folder(tmp_path, "glm4_moe"))  # its first layer is dense
    add_adapter(model, LoraConfig(rank=4, target_modules=["all-linear", "experts"]), seed=1)
    compile_layers(layers(model))
    assert ["forward" in vars(layer) for layer in layers(model)] == [True, False]


def test_an_adapter_of_experts_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    model = load_policy(random_folder(tmp_path / "mixture", "qwen3_moe"))
    add_adapter(model, LoraConfig(rank=4, target_modules=["all-linear", "experts"]), seed=1)
    config: Any = model.peft_config[ADAPTER]
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    save_adapter(trained, config, tmp_path / "adapter")
    dense = random_folder(tmp_path / "dense", "qwen3")
    with raises(ModelError, str(tmp_path / "adapter")):
        load_policy(dense, adapter_path=str(tmp_path / "adapter"))
    with raises(ModelError, "model.lora.target_modules", found=re.compile("no experts")):
        add_adapter(load_policy(dense), LoraConfig(rank=4, target_modules=["experts"]), seed=1)


def test_unknown_weights_of_experts_are_named(tmp_path: Path) -> None:
    model = load_policy(random_folder(tmp_path, "qwen3_moe"))
    with raises(ModelError, "model.lora.target_modules", expected=re.compile("experts")):
        add_adapter(model, LoraConfig(rank=4, target_modules=["experts.gate_proj"]), seed=1)


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
