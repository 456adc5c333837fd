# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from whet.algorithms.aggregation import aggregate, counts
from whet.registry import AGGREGATIONS

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
NAN = torch.nan


def test_the_five_are_there() -> None:
    assert AGGREGATIONS.names() == sorted(MODES)


# rows 1 2 (nan) | 3 | failed; N = 3, S = 2, F = 4
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 6 / 3),
        ("token-sum", 6.0),
        ("seq-mean-token-sum", (3 + 3) / 2),
        ("seq-mean-token-sum-norm", (3 + 3) / 2 / 4),
        ("seq-mean-token-mean", (1.5 + 3) / 2),
    ],
)
def test_by_hand(mode: str, expected: float) -> None:
    values = torch.tensor([[1.0, NAN, 2.0], [3.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]])
    number = counts(mask)
    assert {name: count.tolist() for name, count in number.items()} == {"num_tokens": 3, "num_sequences": 2}
    assert aggregate(mode, values, mask, **number, fixed_length=4).tolist() == expected
    assert aggregate(mode, values, mask, num_tokens=3, num_sequences=2.0, fixed_length=4).tolist() == expected


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), cuts=st.lists(st.integers(0, 12), max_size=5))
def test_any_split_adds_up(make_batch: Callable[..., dict[str, Tensor]], seed: int, cuts: list[int]) -> None:
    """Values and gradients, with splits that hold only failed rows or no rows at all."""
    batch = make_batch(seed)
    mask = batch["response_mask"]
    whole = {**counts(mask), "fixed_length": 9}
    edges = [0, *sorted(cuts), 12]
    for mode in MODES:
        values = batch["advantages"].clone().requires_grad_()
        total = aggregate(mode, values, mask, **whole)
        total.backward()
        split = batch["advantages"].clone().requires_grad_()
        shares = [aggregate(mode, split[a:b], mask[a:b], **whole) for a, b in pairwise(edges)]
        for share in shares:
            share.backward()
        torch.testing.assert_close(torch.stack(shares).sum(), total)
        torch.testing.assert_close(split.grad, values.grad)


def test_counts_of_a_split_add_up(make_batch: Callable[..., dict[str, Tensor]]) -> None:
    mask = make_batch(0)["response_mask"]
    parts = [counts(part) for part in mask.split(5)]
    for name, total in counts(mask).items():
        assert sum(int(part[name]) for part in parts) == int(total)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_sampled_is_zero_with_a_gradient_of_zero(mode: str) -> None:
    values = torch.full((2, 3), NAN, requires_grad=True)
    mask = torch.zeros(2, 3)
    total = aggregate(mode, values, mask, **counts(mask), fixed_length=3)
    total.backward()
    assert total.tolist() == 0.0
    assert values.grad is not None
    assert values.grad.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_row_counts_nowhere(mode: str) -> None:
    values, mask = torch.tensor([[1.0, 5.0], [2.0, 2.0]]), torch.tensor([[1, 1], [0, 0]])
    alone = aggregate(mode, values[:1], mask[:1], **counts(mask[:1]), fixed_length=2)
    assert torch.equal(aggregate(mode, values, mask, **counts(mask), fixed_length=2), alone)
