# SPDX-License-Identifier: Apache-2.0
"""The kernel of rotary positions against its formula, by hand and bit for bit, and in models of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.qwen3 import modeling_qwen3

from whet.kernels import fused
from whet.kernels.fused import ROTATION, Rotation, fuse, reference_rotary, rotary

F32, BF16 = torch.float32, torch.bfloat16


def random(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def heads(rows: int, tokens: int, count: int, size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Makes queries or keys as models do: [B, H, T, D], in memory [B, T, H, D]."""
    return random(rows, tokens, count, size, dtype=dtype, seed=seed).transpose(1, 2).requires_grad_()


@pytest.fixture
def own() -> Iterator[Callable[[ModuleType], Rotation]]:
    """Gives transformers its own function back for the test, and undoes this afterwards."""
    before: dict[ModuleType, Rotation] = {}

    def restored(place: ModuleType) -> Rotation:
        before[place] = vars(place)[ROTATION]
        rotation: Rotation = getattr(before[place], "replaces", before[place])
        setattr(place, ROTATION, rotation)
        return rotation

    yield restored
    for place, rotation in before.items():
        setattr(place, ROTATION, rotation)


def test_by_hand() -> None:
    # The pair (1, 2) turned by 90 degrees, and (3, 4) by 60.
    angles = torch.tensor([[[math.pi / 2, math.pi / 3] * 2]])
    x = torch.tensor([1.0, 3.0, 2.0, 4.0]).view(1, 1, 1, 4)
    half, root = 0.5, math.sqrt(3) / 2
    expected = torch.tensor([-2.0, 3 * half - 4 * root, 1.0, 4 * half + 3 * root])
    torch.testing.assert_close(rotary(x, angles.cos(), angles.sin()).flatten(), expected)
    # A rotation's gradient is turned back.
    turned = rotary(x, angles.cos(), angles.sin())
    torch.testing.assert_close(rotary(turned, angles.cos(), angles.sin(), back=F32), x)


def test_the_kernel_is_what_ran() -> None:
    assert fused._has_kernel(fused._ROTARY, random(2, 3)), "no C++ compiler works here"


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "tokens", "size"), [(1, 37, 32), (3, 5, 8), (2, 7, 20), (1, 300, 128), (1, 0, 4)])
def test_results_and_gradients_have_the_bits_of_transformers(
    dtype: torch.dtype, rows: int, tokens: int, size: int, own: Callable[[ModuleType], Rotation]
) -> None:
    """cos and sin differ between both halves of a head here, which they do not in models."""
    rotation = own(modeling_qwen3)
    q, k = heads(rows, tokens, 4, size, dtype, 0), heads(rows, tokens, 2, size, dtype, 1)
    cos, sin = random(rows, tokens, size, seed=2), random(rows, tokens, size, seed=3)
    found = []
    for function in (rotation, fused._faster(rotation)):
        outs = function(q, k, cos, sin)
        grads = torch.autograd.grad(outs, (q, k), [random(*out.shape, seed=4) for out in outs])
        found.append([*outs, *grads])
    for theirs, ours in zip(*found, strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype and ours.shape == theirs.shape
    with torch.no_grad():
        assert all(map(torch.equal, fused._faster(rotation)(q, k, cos, sin), found[0]))
    torch.testing.assert_close(found[1][0], reference_rotary(q, cos, sin), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("other", "dtype"), [({"unsqueeze_dim": 2}, F32), ({}, torch.float64), ({}, torch.float16)], ids=str
)
def test_other_arguments_go_to_the_function_of_the_model(
    other: dict[str, int], dtype: torch.dtype, own: Callable[[ModuleType], Rotation]
) -> None:
    rotation = own(modeling_llama)
    shape = (2, 5, 3, 8) if other else (2, 3, 5, 8)
    q, k = random(*shape, dtype=dtype, seed=0), random(*shape, dtype=dtype, seed=1)
    cos, sin = random(2, 5, 8, dtype=dtype, seed=2), random(2, 5, 8, dtype=dtype, seed=3)
    ours, theirs = (each(q, k, cos, sin, **other) for each in (fused._faster(rotation), rotation))
    assert all(map(torch.equal, ours, theirs)) and ours[0].dtype == dtype


def test_one_row_of_positions_for_a_whole_batch_is_left_to_torch(own: Callable[[ModuleType], Rotation]) -> None:
    rotation = own(modeling_llama)
    q, k, cos, sin = random(3, 2, 5, 8), random(3, 1, 5, 8, seed=1), random(1, 5, 8, seed=2), random(1, 5, 8, seed=3)
    assert all(map(torch.equal, fused._faster(rotation)(q, k, cos, sin), rotation(q, k, cos, sin)))


def test_tables_that_are_trained_or_narrow_are_left_to_torch(own: Callable[[ModuleType], Rotation]) -> None:
    rotation = own(modeling_llama)
    q, k, cos, sin = (random(1, *shape, seed=size) for size, shape in enumerate([(2, 5, 8), (1, 5, 8), (5, 8), (5, 8)]))
    narrow = fused._faster(rotation)(q, k, cos, sin.bfloat16())
    assert all(map(torch.equal, narrow, rotation(q, k, cos, sin.bfloat16())))
    found = [function(q, k, cos, sin.requires_grad_()) for function in (fused._faster(rotation), rotation)]
    ours, theirs = (torch.autograd.grad(outs, sin, [torch.ones_like(out) for out in outs])[0] for outs in found)
    assert torch.equal(ours, theirs) and bool(ours.any())


@pytest.mark.slow
def test_compiled_layers_are_not_compiled_again_for_each_length(own: Callable[[ModuleType], Rotation]) -> None:
    rotation, graphs = own(modeling_llama), list[int]()

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(len(graph.graph.nodes))
        return graph

    compiled = torch.compile(fused._faster(rotation), backend=backend)
    for length in range(5, 12):
        q, k = random(1, 2, length, 8), random(1, 1, length, 8, seed=1)
        cos, sin = random(1, length, 8, seed=2), random(1, length, 8, seed=3)
        assert all(map(torch.equal, compiled(q, k, cos, sin), rotation(q, k, cos, sin)))
    assert len(graphs) == 2  # for the first length, then for all


@pytest.mark.parametrize(("place", "reason"), [(modeling_cohere, "turns neighbours"), (modeling_olmo2, "rounds")])
def test_a_model_whose_function_differs_keeps_it(
    place: ModuleType, reason: str, own: Callable[[ModuleType], Rotation]
) -> None:
    llama, other = own(modeling_llama), own(place)
    modules = [type("Module", (nn.Module,), {"__module__": each.__name__})() for each in (modeling_llama, place)]
    for _ in range(2):  # a second model replaces nothing again
        with torch.device("meta"):  # as an engine builds a model that is sharded
            fuse(nn.ModuleList(modules))
        assert vars(modeling_llama)[ROTATION].replaces is llama
        assert vars(place)[ROTATION] is other, reason
