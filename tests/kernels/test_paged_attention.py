# SPDX-License-Identifier: Apache-2.0
"""The kernel and its torch twin against attention computed from scratch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from whet.kernels.attention import Scores
from whet.kernels.paged_attention import BLOCK_SIZE, BlockIndex, load_kernel, paged_attention, reference

PLAIN = [(dim, dim, False) for dim in (16, 48, 64, 128)]


def attend_from_scratch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, cap: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """One sequence, one token after another: q [L, H, D], k [L, KV, D], v [L, KV, V], in float64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    rows = []
    for t in range(len(q)):
        start = max(0, t + 1 - window) if window else 0
        heads = []
        for h in range(q.shape[1]):
            scores = k[start : t + 1, h // group] @ q[t, h] * scale
            weights = (cap * (scores / cap).tanh() if cap else scores).exp()
            weights = weights / (weights.sum() + (0 if sinks is None else sinks[h].double().exp()))
            heads.append(weights @ v[start : t + 1, h // group])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


@cache
def expectation(
    heads: int, kv_heads: int, dim: int, value_dim: int, has_sinks: bool, window: int, cap: float
) -> tuple[list[list[torch.Tensor]], torch.Tensor | None, list[torch.Tensor]]:
    """Queries, keys and values of three sequences, sinks, and the attention from scratch."""
    draw = torch.Generator().manual_seed(heads * dim)
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, value_dim)
    data = [[torch.randn(n, *shape, generator=draw) for shape in shapes] for n in (1, 17, 40)]
    sinks = torch.randn(heads, generator=draw) * 2 if has_sinks else None
    return data, sinks, [attend_from_scratch(*each, dim**-0.5, window, cap, sinks) for each in data]


class OnDevice:
    """The way of accelerators, here on the host: its cache is laid out otherwise, and has a spare block at its end."""

    def __init__(self) -> None:
        self.kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, *given: Any) -> torch.Tensor:
        query, key, value, keys, _, tables, rows, positions, *scores = given
        if self.kept is None:
            shape = (key.shape[1], len(keys) + 1, BLOCK_SIZE)
            self.kept = torch.zeros(*shape, key.shape[2]), torch.zeros(*shape, value.shape[2])
        longest = int(rows[rows >= 0].bincount().max())
        index = BlockIndex.of(tables, rows, positions, len(keys), longest, int(positions.max()) + 1)
        out = index.attend(query, key, value, *self.kept, Scores(*scores))
        return out.masked_fill((rows < 0)[:, None, None], 0)


@pytest.mark.parametrize("kind", ["kernel", "torch", "device", "device, few at once"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (7, 1), (6, 2)])
@pytest.mark.parametrize(("dim", "value_dim", "has_sinks"), [*PLAIN, (48, 32, False), (32, 64, True), (64, 64, True)])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (5, 0.0), (0, 1.5)])
def test_prefill_then_decode(
    kind: str,
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    has_sinks: bool,
    window: int,
    cap: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function: Callable[..., torch.Tensor] = {"kernel": paged_attention, "torch": reference}.get(kind, OnDevice())
    if kind == "device, few at once":
        monkeypatch.setattr("whet.kernels.paged_attention.GATHERED", 1)
    data, sinks, expected = expectation(heads, kv_heads, dim, value_dim, has_sinks, window, cap)
    lengths = [len(q) for q, *_ in data]
    keys = torch.full((16, kv_heads, dim, BLOCK_SIZE), float("nan"))  # what was never written must not matter
    values = torch.full((16, kv_heads, BLOCK_SIZE, value_dim), float("nan"))
    tables = torch.tensor([[9, 0, 0], [3, 12, 0], [1, 15, 4]], dtype=torch.int32)

    def run(tokens: list[tuple[int, int]]) -> torch.Tensor:
        """The named (sequence, position)s, with two rows of padding."""
        q, k, v = (
            torch.stack([data[s][i][p] for s, p in tokens] + [torch.ones_like(data[0][i][0])] * 2) for i in range(3)
        )
        rows = torch.tensor([s for s, _ in tokens] + [-1, -1], dtype=torch.int32)
        positions = torch.tensor([p for _, p in tokens] + [0, 0])
        out = function(q, k, v, keys, values, tables, rows, positions, dim**-0.5, window, cap, sinks)
        assert (out[-2:] == 0).all()
        return out[:-2]

    prefill = [(s, p) for s, n in enumerate(lengths) for p in range(n - 1)]
    out = run(prefill)
    for row, (s, p) in zip(out, prefill, strict=True):
        torch.testing.assert_close(row.double(), expected[s][p], atol=2e-6, rtol=1e-5)
    last = [(s, n - 1) for s, n in enumerate(lengths)]
    for row, (s, p) in zip(run(last), last, strict=True):
        torch.testing.assert_close(row.double(), expected[s][p], atol=2e-6, rtol=1e-5)


def test_bfloat16_rounds_the_float32_result() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(40, h, 64, generator=draw).bfloat16() for h in (4, 2, 2))
    tables, rows, positions = (
        torch.tensor([[0, 1, 2]], dtype=torch.int32),
        torch.zeros(40, dtype=torch.int32),
        torch.arange(40),
    )

    def run(dtype: torch.dtype) -> torch.Tensor:
        keys, values = torch.empty(3, 2, 64, BLOCK_SIZE, dtype=dtype), torch.empty(3, 2, BLOCK_SIZE, 64, dtype=dtype)
        return paged_attention(q.to(dtype), k.to(dtype), v.to(dtype), keys, values, tables, rows, positions, 0.125)

    torch.testing.assert_close(run(torch.bfloat16), run(torch.float32).bfloat16(), atol=0, rtol=1e-2)


@pytest.mark.parametrize("function", [paged_attention, reference])
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_the_beginnings_of_keys(
    function: Callable[..., torch.Tensor], window: int, dtype: torch.dtype
) -> None:
    """The result equals the one with separate values; unwritten memory must not matter."""
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(40, heads, 48, generator=draw).to(dtype) for heads in (6, 1))
    tables = torch.tensor([[2, 0, 1]], dtype=torch.int32)
    where = tables, torch.zeros(40, dtype=torch.int32), torch.arange(40), 0.2, window
    found = []
    for size in (32, 0):
        keys, values = (torch.full(shape, float("nan"), dtype=dtype) for shape in ((3, 1, 48, 16), (3, 1, 16, size)))
        found.append(function(q, k, k[..., :32], keys, values, *where))
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_strided_inputs() -> None:
    """transformers hands over transposed views."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(h, 20, 64, generator=draw).transpose(0, 1) for h in (4, 2, 2))
    arguments = (torch.tensor([[0, 1]], dtype=torch.int32), torch.zeros(20, dtype=torch.int32), torch.arange(20), 0.125)

    def cache() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(2, 2, 64, BLOCK_SIZE), torch.empty(2, 2, BLOCK_SIZE, 64)

    whole = paged_attention(q.contiguous(), k.contiguous(), v.contiguous(), *cache(), *arguments)
    assert torch.equal(paged_attention(q, k, v, *cache(), *arguments), whole)


def test_the_kernel_is_what_ran() -> None:
    assert load_kernel() is not None, "no C++ compiler works here: the tests above compared torch with torch"


def test_loading_the_kernel_keeps_denormals() -> None:
    load_kernel()
    assert (torch.tensor([1e-40]) * 1.0).item() > 0  # -ffast-math would have switched the process to flush-to-zero
