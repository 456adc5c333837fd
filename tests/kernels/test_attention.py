# SPDX-License-Identifier: Apache-2.0
"""Causal attention in two products against the attention of torch's kernel."""

from __future__ import annotations

import itertools

import pytest
import torch

from whet.kernels import attention


@pytest.mark.parametrize("window", [0, 3])
def test_attention_written_out_is_the_fused_one(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    query = torch.randn(3, 4, 9, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(3, 2, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    results = []
    for short in (0, 8):
        monkeypatch.setattr(attention, "SHORT", short)
        out = attention.causal(query, key, value, attention.Scores(0.3, window), None)
        results.append([out, *torch.autograd.grad(out.square().sum(), (query, key, value))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [(0, [True, True, False, True]), (8, [True, True, False, True]), (9, [True, True, False, False])],
)
def test_heads_in_groups_are_repeated_where_torch_would_write_all_scores(
    generation: int, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an accelerator: in float32, and with a mask before Hopper. Seen on an H100, see LOG.md."""
    monkeypatch.setattr(attention, "_generation", lambda device: generation)
    cases = itertools.product((torch.float32, torch.bfloat16), (False, True))
    found = [attention._writes_scores(torch.empty(1, dtype=d, device="meta"), is_masked=m) for d, m in cases]
    assert found == expected
    assert not attention._writes_scores(torch.empty(1), is_masked=True)
