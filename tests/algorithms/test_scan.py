# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from whet.algorithms.statistics import BLOCK, next_sampled, reverse_scan, reward_to_go


def slow_reverse_scan(terms: Tensor, mask: Tensor, decay: float) -> Tensor:
    result = torch.zeros_like(terms)
    for row in range(terms.shape[0]):
        carried = 0.0
        for t in reversed(range(terms.shape[1])):
            if mask[row, t]:
                result[row, t] = carried = float(terms[row, t]) + decay * carried
    return result


def test_by_hand() -> None:
    # decay .5, backwards: 8; 2 + .5 * 8 = 6; past the masked 99; 1 + .5 * 6 = 4
    terms = torch.tensor([[1.0, 99.0, 2.0, 8.0]])
    mask = torch.tensor([[1, 0, 1, 1]])
    assert reverse_scan(terms, mask, 0.5).tolist() == [[4.0, 0.0, 6.0, 8.0]]
    assert reward_to_go(terms, mask, 0.5).tolist() == [[4.0, 0.0, 6.0, 8.0]]


def test_the_next_sampled_number_by_hand() -> None:
    x = torch.tensor([[1.0, 99.0, 2.0, 99.0], [99.0, 99.0, 99.0, 99.0], [3.0, 4.0, 99.0, 5.0]])
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 1]])
    assert next_sampled(x, mask).tolist() == [[2.0, 0.0, 0.0, 0.0], [0.0] * 4, [4.0, 5.0, 0.0, 0.0]]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 4),
    positions=st.integers(1, 40),
    decay=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
)
def test_equals_the_slow_loop(seed: int, rows: int, positions: int, decay: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    terms = torch.randn(rows, positions, generator=draw, dtype=torch.float64)
    mask = torch.randint(0, 2, (rows, positions), generator=draw)
    torch.testing.assert_close(reverse_scan(terms, mask, decay), slow_reverse_scan(terms, mask, decay))


@pytest.mark.parametrize("positions", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_blocks_join_without_a_seam(positions: int) -> None:
    # all ones with decay 1 count the positions that are left
    counted = reverse_scan(torch.ones(2, positions), torch.ones(2, positions), 1.0)
    assert counted.tolist() == [[float(positions - t) for t in range(positions)]] * 2


def test_the_arguments_stay_as_they_were_and_nan_is_masked() -> None:
    terms, mask = torch.tensor([[1.0, torch.nan, 2.0]]), torch.tensor([[True, False, True]])
    before = terms.clone()
    assert reverse_scan(terms, mask, 1.0).tolist() == [[3.0, 0.0, 2.0]]
    torch.testing.assert_close(terms, before, rtol=0, atol=0, equal_nan=True)
