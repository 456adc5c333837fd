# SPDX-License-Identifier: Apache-2.0
"""Kernels with tiles of one shape, by Triton's interpreter, against plain torch; and the same bits in any batch."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from tests.kernels.interpreted import exact_products
from whet.kernels import batch_invariant_triton, fused
from whet.kernels.tiles import tile_tokens, tiles_of
from whet.kernels.varlen_attention import Stretches, reference

pytestmark = pytest.mark.skipif(not batch_invariant_triton.INTERPRETED, reason="needs Triton's interpreter")


def test_tiles_by_hand() -> None:
    lengths, rows, positions = torch.tensor([5, 0, 2]), torch.tensor([7, 8, 9]), torch.tensor([0, 3, 16])
    found = tiles_of(lengths, rows, positions, 4, 5)
    assert found.tolist() == [[0, 4, 7, 0], [4, 1, 7, 4], [5, 2, 9, 16], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert tiles_of(lengths, rows, positions, 4).tolist() == found[:3].tolist()
    assert [tile_tokens(*heads) for heads in ((14, 2), (4, 4), (64, 1), (128, 1))] == [8, 64, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window"), [(4, 2, 16, 0), (6, 2, 24, 5), (32, 1, 8, 70)])
def test_attention_of_packed_rows(heads: int, kv_heads: int, dim: int, window: int) -> None:
    """Rows of which two share a prompt, one is longer than a tile of keys, and the last is padding."""
    torch.manual_seed(0)
    own, prefix = torch.tensor([90, 9, 5]), torch.tensor([0, 3, 3])
    index = torch.full((3, 100), -1)
    starts = own.cumsum(0) - own
    for row, (first, shared) in enumerate(zip(starts.tolist(), prefix.tolist(), strict=True)):
        ids = [*range(shared), *range(first, first + int(own[row]))]
        index[row, : len(ids)] = torch.tensor(ids)
    where = Stretches.of(own, prefix, index, tile_tokens(heads, kv_heads))
    query, key, value = (torch.randn(where.size, many, dim) for many in (heads, kv_heads, kv_heads))
    layout = where.queries, where.keys, where.source, where.longest_query, where.longest_key, dim**-0.5, window
    expected, sums = reference(query, key, value, *layout)
    assert where.source is not None and where.tiles is not None
    found, log_sums = batch_invariant_triton.attention(
        query, key, value, where.source, where.tiles, (dim**-0.5, window, 0.0), 1, where.longest_key
    )
    assert torch.allclose(found, expected, atol=1e-6) and torch.allclose(log_sums, sums, atol=1e-5)


def test_a_token_attends_alike_alone_and_in_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    exact_products(monkeypatch)
    torch.manual_seed(1)
    query, key, value = torch.randn(100, 4, 16), torch.randn(100, 2, 16), torch.randn(100, 2, 16)
    query, key, value = (x.bfloat16() for x in (query, key, value))
    args = torch.arange(100), (0.25, 0, 0.0), 1, 128

    def attended(lengths: list[int], positions: list[int], first: int) -> torch.Tensor:
        tiles = tiles_of(torch.tensor(lengths), torch.zeros(len(lengths)).long(), torch.tensor(positions), 32)
        part = query[first : first + sum(lengths)]
        return batch_invariant_triton.attention(part, key, value, args[0], tiles, *args[1:])[0]

    whole = attended([100], [0], 0)
    assert torch.equal(attended([1], [77], 77)[0], whole[77])
    assert torch.equal(attended([3, 1, 27], [69, 72, 73], 69), whole[69:])


@pytest.mark.parametrize(("rows", "columns", "depth"), [(70, 5, 40), (3, 130, 64)])
def test_product_and_norm(rows: int, columns: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    exact_products(monkeypatch)
    torch.manual_seed(2)
    x, weight, bias = torch.randn(2, rows, depth), torch.randn(columns, depth), torch.randn(columns)
    for many in (1, 4096):  # with wide tiles and narrow ones
        monkeypatch.setattr(batch_invariant_triton, "MANY_COLUMNS", many)
        found = batch_invariant_triton.product(x, weight, bias)
        assert torch.allclose(found, F.linear(x, weight, bias), atol=2e-5)
        assert torch.equal(batch_invariant_triton.product(x[1, 2:3], weight, bias), found[1, 2:3])
        assert torch.allclose(batch_invariant_triton.product(x, weight, None), F.linear(x, weight), atol=2e-5)
    scaled = torch.rand(depth) + 0.5
    for got, expected in zip(
        batch_invariant_triton.normalise(x, scaled, 1e-6), fused.normalise(x, scaled, 1e-6), strict=True
    ):
        assert got.shape == expected.shape and torch.allclose(got, expected, atol=1e-6)
