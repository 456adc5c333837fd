# SPDX-License-Identifier: Apache-2.0
"""Norm and MLP in place of a model's own: their results, their gradients, and the modules left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

from whet.kernels.fused import GatedMLP, RMSNorm, _SiluGate, fuse


def test_gradients() -> None:
    draw = torch.Generator().manual_seed(0)
    x, other = (torch.randn(3, 5, dtype=torch.float64, generator=draw, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(_SiluGate.apply, (x, other))


@pytest.mark.parametrize("folder", ["model_folder", "qwen25_folder"])
def test_a_model_computes_the_same_and_keeps_its_names(folder: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(folder)
    own, fused = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2))
    layers = own.config.num_hidden_layers
    norms = 4 if own.config.model_type == "qwen3" else 2  # with those of queries and keys
    assert fuse(fused) == layers * (norms + 1) + 1
    assert fuse(fused) == 0
    assert [name for name, _ in fused.named_parameters()] == [name for name, _ in own.named_parameters()]
    ids = torch.randint(3, 40, (3, 17), generator=torch.Generator().manual_seed(0))
    losses = [model(ids, labels=ids).loss for model in (own, fused)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    gradients = []
    for model, loss in zip((own, fused), losses, strict=True):
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (gradients[1] - gradients[0]).norm() < 1e-5 * gradients[0].norm()


def test_under_autocast_states_come_out_as_the_next_product_reads_them() -> None:
    norm = RMSNorm(nn.Parameter(torch.rand(8)), eps=1e-6)
    states = torch.randn(4, 8)
    expected = norm(states).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(norm(states), expected)
        assert norm(states.bfloat16()).dtype == torch.float32  # those of queries and keys, as transformers has them


SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 30,
    "pad_token_id": 0,
}


def test_llama_is_replaced_and_what_differs_is_left() -> None:
    llama = LlamaForCausalLM(LlamaConfig(**SMALL))
    assert fuse(llama) == 4 and isinstance(llama.model.layers[0].mlp, GatedMLP)
    gemma = GemmaForCausalLM(GemmaConfig(**SMALL, hidden_act="gelu_pytorch_tanh"))  # its norm multiplies by 1 + weight
    assert fuse(gemma) == 0


def test_a_norm_that_looks_alike_and_computes_something_else_is_left() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)

    assert fuse(nn.Sequential(Twice())) == 0
