# SPDX-License-Identifier: Apache-2.0
"""Linear attention of packed rows through flash-linear-attention: a stand-in of its signature that loops over rows.

tests/rollout/native/test_layer_kinds.py compares the flow itself with plain transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from whet.kernels import delta_rule
from whet.kernels.delta_rule import PackedFlow, packed_rule

BEFORE = torch.tensor([-1, *range(69), -1, 70, 71, 4, 73, 74, 4, 76])  # rows of 70 and 3, and two behind token 4
SIZE, HEADS, WIDTH = 80, 2, 4
CALLS = list[list[int]]()


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The signature of fla-core 0.6, one sequence after the other, token by token."""
    assert scale is None and output_final_state and use_qk_l2norm_in_kernel and cu_seqlens is not None
    assert len(q) == 1 and q.shape == k.shape and v.shape[:3] == g.shape == beta.shape
    assert cu_seqlens.dtype == torch.int64 and cu_seqlens[0] == 0 and cu_seqlens[-1] == q.shape[1]
    assert initial_state is None or initial_state.shape == (len(cu_seqlens) - 1, HEADS, WIDTH, WIDTH)
    CALLS.append(cu_seqlens.diff().tolist())
    outs, ends = [], []
    for number, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        begin = None if initial_state is None else initial_state[number : number + 1]
        out, end = torch_recurrent_gated_delta_rule(
            *(each[:, start:stop] for each in (q, k, v)),
            g=g[:, start:stop],
            beta=beta[:, start:stop],
            initial_state=begin,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        outs.append(out)
        ends.append(end)
    return torch.cat(outs, 1), torch.cat(ends)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """flash-linear-attention, on a device that runs Triton."""
    module = ModuleType("fla.ops.gated_delta_rule")
    vars(module)["chunk_gated_delta_rule"] = chunk_gated_delta_rule
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    monkeypatch.setattr(delta_rule, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(delta_rule, "runs_triton", lambda device, otherwise: True)
    packed_rule.cache_clear()
    CALLS.clear()
    yield
    packed_rule.cache_clear()


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Query, key and value [S, H, W], the log of the decay and the rate [S, H]."""
    generator = torch.Generator().manual_seed(1)
    vectors = [torch.randn(SIZE, HEADS, WIDTH, generator=generator) for _ in range(3)]
    decay, rate = -torch.rand(SIZE, HEADS, generator=generator), torch.rand(SIZE, HEADS, generator=generator)
    return tuple(each.to(dtype).requires_grad_() for each in (*vectors, decay, rate))


def scanned(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The output of real tokens, and the gradients of a weighted sum of it."""
    flow = PackedFlow.of(BEFORE, SIZE)
    out = flow.scan(0, torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule, given)
    weights = torch.arange(out.numel()).view(out.shape).cos()
    return out.detach(), torch.autograd.grad((out.float() * weights).sum(), given)


def test_sequences_of_any_length_in_two_calls(installed: None) -> None:
    out, gradients = scanned(inputs(torch.bfloat16))
    assert CALLS == [[5, 3], [65, 3, 2]]  # the prompt and the row alone; what goes on from the prompt
    expected, wanted = scanned(tuple(each.detach().float().requires_grad_() for each in inputs(torch.bfloat16)))
    assert len(CALLS) == 2  # float32 goes grid by grid
    torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)
    for found, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found.float(), other, atol=0.05, rtol=0.05)
    assert not out[len(BEFORE) :].any()


def test_without_it_nothing_is_imported() -> None:
    packed_rule.cache_clear()
    assert packed_rule(torch.device("cpu")) is None
