# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels of paged attention, by its interpreter, against plain torch."""

import pytest
import torch

pytest.importorskip("triton")

from tests.first import first
from whet.kernels import paged_attention_triton as kernels
from whet.kernels.paged_attention import reference
from whet.kernels.tiles import tile_tokens, tiles_of

pytestmark = pytest.mark.skipif(not kernels.INTERPRETED, reason="needs Triton's interpreter")


@pytest.mark.slow
@pytest.mark.parametrize("programs", [1, 64], ids=["whole", "split"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "cap"), [(4, 2, 16, 0, 0.0), (6, 2, 24, 0, 0.0), (4, 1, 32, 7, 5.0)]
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention(
    heads: int,
    kv_heads: int,
    dim: int,
    window: int,
    cap: float,
    has_sinks: bool,
    programs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that begin, that have a partly filled block and that fill one, in slots without order."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    torch.manual_seed(0)
    blocks, slots, positions = 40, torch.tensor([4, 0, 2]), torch.tensor([0, 37, 79])
    tables = torch.randperm(blocks)[:30].view(5, 6).int()
    keys, values = torch.randn(2, kv_heads, blocks, 16, dim)
    query, key, value = (torch.randn(3, many, dim) for many in (heads, kv_heads, kv_heads))
    own = keys.permute(1, 0, 3, 2).contiguous(), values.transpose(0, 1).contiguous()
    form = dim**-0.5, window, cap, torch.randn(heads) * 2 if has_sinks else None
    expected = reference(query, key, value, *own, tables, slots.int(), positions, *form)
    given = (query, key, value, keys, values, tables, slots, positions)
    found = kernels.decode_attention(*given, *form)
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.equal(own[0], keys.permute(1, 0, 3, 2)) and torch.equal(own[1], values.transpose(0, 1))


@pytest.mark.slow
def test_the_rest_of_a_context_is_not_read() -> None:
    keys, values = (torch.full((1, 3, 16, 16), float("nan")) for _ in range(2))
    one = torch.ones(1, 1, 16)
    tables = torch.tensor([[2, 1]], dtype=torch.int32)
    first = torch.zeros(1, dtype=torch.int64)
    found = kernels.decode_attention(one, one, 3 * one, keys, values, tables, first, first, 1.0, 0, 0.0)
    assert torch.equal(found, 3 * one) and torch.equal(values[0, 2, 0], 3 * one[0, 0])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "cap"),
    first(1, [(4, 2, 16, 0, 0.0), (6, 2, 24, 0, 0.0), (4, 1, 32, 7, 5.0)], others=pytest.mark.slow),
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_in_tiles(heads: int, kv_heads: int, dim: int, window: int, cap: float, has_sinks: bool) -> None:
    """A sequence of several tiles, the end of one that began before, a single token, and padding; keys that no token
    sees are NaN."""
    torch.manual_seed(0)
    lengths, starts, rows = torch.tensor([70, 5, 1]), torch.tensor([0, 30, 47]), torch.tensor([3, 0, 1])
    blocks, total = 24, int(lengths.sum())
    tables = torch.randperm(blocks)[:20].view(4, 5).int()
    keys, values = torch.full((2, kv_heads, blocks + 1, 16, dim), float("nan"))
    row = rows.repeat_interleave(lengths)
    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
    for own, start in zip(tables[rows], starts.tolist(), strict=True):
        for place in range(start):
            for cache in (keys, values):
                cache[:, own[place // 16], place % 16] = torch.randn(kv_heads, dim)
    query, key, value = (torch.randn(total + 3, many, dim) for many in (heads, kv_heads, kv_heads))
    slots = torch.full((total + 3,), blocks * 16)
    slots[:total] = tables[row, positions // 16] * 16 + positions % 16
    kept = keys.permute(1, 0, 3, 2).contiguous(), values.transpose(0, 1).contiguous()
    given = query[:total], key[:total], value[:total]
    form = dim**-0.5, window, cap, torch.randn(heads) * 2 if has_sinks else None
    expected = reference(*given, *kept, tables, row.int(), positions, *form)
    tiles = tiles_of(lengths, rows, starts, tile_tokens(heads, kv_heads), 9)
    found = kernels.tile_attention(query, key, value, keys, values, tables, slots, tiles, *form)
    assert torch.allclose(found[:total], expected, atol=1e-6)
    written = keys.permute(1, 0, 3, 2), values.transpose(0, 1)
    assert all(torch.equal(a[:-1].nan_to_num(9.0), b[:-1].nan_to_num(9.0)) for a, b in zip(kept, written, strict=True))
