# SPDX-License-Identifier: Apache-2.0
"""Attention in one call over all rows, and one compilation for all layers, against attention by bunches of rows."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.models.test_outputs import random_batch
from whet.kernels import compiled_layers
from whet.kernels.bfloat16_copies import NarrowCopies, NarrowLinear
from whet.kernels.compiled_layers import compile_layers
from whet.kernels.varlen_attention import varlen_attention
from whet.models.load import layers, load_policy, recompute_activations
from whet.models.outputs import ForwardSettings, model_outputs
from whet.models.packing import layout

PLAIN, ONE_CALL = ForwardSettings(), ForwardSettings(in_stretches=True)


@pytest.fixture
def model(model_folder: Path) -> PreTrainedModel:
    return load_policy(model_folder)


def answers() -> dict[str, torch.Tensor]:
    """Three answers of 3, 1 and 2 tokens to the prompt 5 6, and one of 2 tokens to the prompt 7."""
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0, 1, 1, 1, 0]])
    ids = torch.tensor([[5, 6, 11, 12, 13], [5, 6, 21, 0, 0], [5, 6, 31, 32, 0], [0, 7, 41, 42, 0]]) * mask
    response = mask[:, 2:].clone()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "response_mask": response,
    }


def test_stretches_by_hand() -> None:
    where = layout(answers(), share_prompts=True, in_stretches=True)
    # T: 5 6 11 12 13 | 7 41 42 | 31 32 | 21: the longest first, the shared prompt once
    assert where.input_ids.tolist() == [5, 6, 11, 12, 13, 7, 41, 42, 31, 32, 21]
    found = where.stretches
    assert found is not None and found.size == 11 and where.bunches == ()
    assert found.queries[:6].tolist() == [0, 5, 8, 10, 11, 11] and len(found.queries) == 65
    assert found.keys[:6].tolist() == [0, 5, 8, 12, 15, 15]
    assert found.source is not None and found.own is not None and found.shared is not None and found.users is not None
    assert found.source.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 8, 9, 0, 1, 10]
    assert found.own.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 14]
    assert found.shared.tolist() == [0, 1] and found.users.tolist() == [[8, 12], [9, 13]]
    assert (found.longest_query, found.longest_key) == (8, 8)


def test_rows_without_a_shared_prompt_are_their_own_keys() -> None:
    found = layout(answers(), in_stretches=True).stretches
    assert found is not None and found.source is None and torch.equal(found.queries, found.keys)


def test_gradients_of_a_shared_prompt_are_summed_in_float32() -> None:
    from whet.kernels.varlen_attention import _to_tokens

    found = layout(answers(), share_prompts=True, in_stretches=True).stretches
    assert found is not None
    grad = torch.arange(1.0, 16.0)[:, None, None].bfloat16()
    # token 0 is key 0, 8 and 12, token 1 is key 1, 9 and 13
    expected = [1 + 9 + 13, 2 + 10 + 14, 3, 4, 5, 6, 7, 8, 11, 12, 15]
    assert _to_tokens(grad, found.own, found.shared, found.users).flatten().tolist() == expected


@pytest.mark.parametrize("share_prompts", [True, False])
def test_one_call_gives_what_bunches_give(model: PreTrainedModel, share_prompts: bool) -> None:
    needs, batch = frozenset({"log_probs", "entropy"}), answers()
    found = []
    for in_stretches in (False, True):
        settings = ForwardSettings(share_prompts=share_prompts, in_stretches=in_stretches)
        outputs = model_outputs(model, batch, needs, settings)
        model.zero_grad()
        (outputs["log_probs"].sum() + outputs["entropy"].sum()).backward()  # type: ignore[no-untyped-call]
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        found.append([*(each.detach() for each in outputs.values()), *grads])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=2e-5)


def test_sinks_and_their_gradient() -> None:
    """Against each row's attention written out, with one more key of which each head has the score, and no value."""
    where = layout(answers(), share_prompts=True, in_stretches=True)
    found = where.stretches
    assert found is not None and found.source is not None
    draw = torch.Generator().manual_seed(0)
    given = [torch.randn(11, heads, 8, generator=draw, dtype=torch.float64) for heads in (4, 2, 2)]
    leaves = [each.requires_grad_() for each in (*given, torch.randn(4, generator=draw, dtype=torch.float64))]
    query, key, value, sinks = leaves
    got = varlen_attention(query, key, value, found, 0.3, 2, sinks)
    rows = []
    for begin, end, first, last in zip(found.queries, found.queries[1:], found.keys, found.keys[1:], strict=False):
        k, v = (x[found.source[first:last]].repeat_interleave(2, 1).transpose(0, 1) for x in (key, value))
        back = torch.arange(len(found.source[first:last]) - (end - begin), last - first)[:, None] - torch.arange(
            last - first
        )
        scores = (query[begin:end].transpose(0, 1) @ k.mT * 0.3).masked_fill((back < 0) | (back >= 2), float("-inf"))
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], -1)
        rows.append((scores.softmax(-1)[..., :-1] @ v).transpose(0, 1))
    expected = torch.cat(rows)
    assert torch.allclose(got, expected, atol=1e-6)
    weights = torch.randn(got.shape, generator=draw, dtype=torch.float64)
    for one, other in zip(*(torch.autograd.grad(out, leaves, weights) for out in (got, expected)), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.fixture
def without_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces and checks, and generates no code."""
    compile_ = torch.compile
    monkeypatch.setattr(compiled_layers.torch, "compile", lambda run, **how: compile_(run, backend="aot_eager", **how))
    compiled_layers._compiled.cache_clear()
    torch._dynamo.reset()
    yield  # type: ignore[misc]
    compiled_layers._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_layer_is_compiled_once_for_all(model: PreTrainedModel, without_a_backend: None) -> None:
    compiled = copy.deepcopy(model)
    compile_layers(layers(compiled))
    torch._dynamo.utils.counters.clear()
    for checkpointed in (False, True):
        if checkpointed:
            recompute_activations(compiled)
        for seed in range(2):
            batch = random_batch(rows=5 + 3 * seed, seed=seed)
            for one in (model, compiled):
                one.zero_grad()
                model_outputs(one.train(), batch, frozenset({"log_probs"}), ONE_CALL)["log_probs"].sum().backward()  # type: ignore[no-untyped-call]
            for a, b in zip(model.parameters(), compiled.parameters(), strict=True):
                assert a.grad is not None and b.grad is not None and torch.allclose(a.grad, b.grad, atol=1e-5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert len(layers(model)) > 1 and graphs <= 2  # lengths of the second batch make shapes dynamic
    assert not compiled_layers._refused


def test_a_copy_of_a_compiled_model_runs_its_own_layers(model: PreTrainedModel) -> None:
    compile_layers(layers(model))
    twin = copy.deepcopy(model)
    for one, other in zip(layers(model), layers(twin), strict=True):
        assert vars(one)["forward"].layer is one and vars(other)["forward"].layer is other


def test_narrow_copies(model: PreTrainedModel) -> None:
    """The same log-probs and gradients as autocast's casts, over two passes and a step in between."""
    plain, batches = copy.deepcopy(model), [random_batch(rows=5 + 3 * seed, seed=seed) for seed in range(2)]
    copies, settings = NarrowCopies(layers(model)), ForwardSettings(dtype=torch.bfloat16)
    for _ in range(2):
        with copies.used():
            for batch in batches:
                found = [model_outputs(one, batch, frozenset({"log_probs"}), settings) for one in (plain, model)]
                assert torch.equal(found[0]["log_probs"], found[1]["log_probs"])
                for each in found:
                    each["log_probs"].sum().backward()  # type: ignore[no-untyped-call]
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and b.grad.dtype == torch.float32
            assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-6)
            with torch.no_grad():
                a.add_(0.1 * a.grad), b.copy_(a)
            a.grad = b.grad = None
    twin = copy.deepcopy(model)
    assert not any(isinstance(each, NarrowLinear) for each in twin.modules())
    assert {name for name, _ in twin.named_parameters()} == {name for name, _ in model.named_parameters()}
