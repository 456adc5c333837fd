# SPDX-License-Identifier: Apache-2.0
"""Kernels with tiles of one shape, by Triton's interpreter, against plain torch; and the same bits in any batch."""

import pytest
import torch

pytest.importorskip("triton")

from tests.models.interpreted import exact_products
from whet.models import fixed_kernels
from whet.models.packing import tile_tokens, tiles_of

pytestmark = pytest.mark.skipif(not fixed_kernels.INTERPRETED, reason="needs Triton's interpreter")


def test_tiles_by_hand() -> None:
    lengths, rows, positions = torch.tensor([5, 0, 2]), torch.tensor([7, 8, 9]), torch.tensor([0, 3, 16])
    found = tiles_of(lengths, rows, positions, 4, 5)
    assert found.tolist() == [[0, 4, 7, 0], [4, 1, 7, 4], [5, 2, 9, 16], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert tiles_of(lengths, rows, positions, 4).tolist() == found[:3].tolist()
    assert [tile_tokens(*heads) for heads in ((14, 2), (4, 4), (64, 1), (128, 1))] == [8, 64, 1, 1]


def test_a_token_attends_alike_alone_and_in_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    exact_products(monkeypatch)
    torch.manual_seed(1)
    query, key, value = torch.randn(100, 4, 16), torch.randn(100, 2, 16), torch.randn(100, 2, 16)
    query, key, value = (x.bfloat16() for x in (query, key, value))
    args = torch.arange(100), (0.25, 0, 0.0), 1, 128

    def attended(lengths: list[int], positions: list[int], first: int) -> torch.Tensor:
        tiles = tiles_of(torch.tensor(lengths), torch.zeros(len(lengths)).long(), torch.tensor(positions), 32)
        part = query[first : first + sum(lengths)]
        return fixed_kernels.attention(part, key, value, args[0], tiles, *args[1:])[0]

    whole = attended([100], [0], 0)
    assert torch.equal(attended([1], [77], 77)[0], whole[77])
    assert torch.equal(attended([3, 1, 27], [69, 72, 73], 69), whole[69:])
