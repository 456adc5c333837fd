# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from whet.algorithms.statistics import Groups, masked_mean, reverse_scan, row_sums, segment_means, whiten

NAN = torch.nan


def test_sums_and_mean_by_hand() -> None:
    x, mask = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert row_sums(x, mask).tolist() == [3.0, 6.0]
    assert masked_mean(x, mask).tolist() == 3.0  # not 9 / 6: the mask decides what counts


def test_whiten_by_hand() -> None:
    # 1, 2, 6: mean 3, deviations -2, -1, 3, variance 14 / 2 = 7
    x, mask = torch.tensor([[1.0, 2.0, NAN], [6.0, NAN, NAN]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    expected = torch.tensor([[-2.0, -1.0, 0.0], [3.0, 0.0, 0.0]]) / (7.0 + 1e-8) ** 0.5
    torch.testing.assert_close(whiten(x, mask), expected)


@pytest.mark.parametrize("sampled", [0, 1])
def test_fewer_than_two_tokens_whiten_to_zero(sampled: int) -> None:
    mask = (torch.arange(4) < sampled).long()[None]
    assert whiten(torch.full((1, 4), 3.7), mask).tolist() == [[0.0] * 4]
    assert masked_mean(torch.full((1, 4), NAN), torch.zeros(1, 4)).tolist() == 0.0


@pytest.mark.parametrize("value", [0.1, 1000.1, -3e7])
def test_equal_values_have_exactly_no_deviation(value: float) -> None:
    # float32 totals would leave a rounding error, which a deviation of 1e-8 makes look like a signal
    x, mask = torch.full((7, 11), value), torch.ones(7, 11)
    assert not whiten(x, mask).any()
    groups = Groups(torch.zeros(7, dtype=torch.long), mask)
    assert not groups.deviation(x[:, 0]).any()
    assert not groups.std(x[:, 0]).any()


SUMS = [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scores", [SUMS, [0.1 + 0.2 - 0.3, 0.0, 0.3 - 0.2 - 0.1], [1e4 * each for each in SUMS]])
def test_values_that_differ_by_rounding_have_no_deviation(scores: list[float], dtype: torch.dtype) -> None:
    parts = torch.tensor([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [0.3, 0.3, 0.0]], dtype=dtype)
    for x in (torch.tensor(scores, dtype=dtype), parts[:, 0] + parts[:, 1] + parts[:, 2]):
        groups = Groups(torch.zeros(3, dtype=torch.long), torch.ones(3, 1))
        assert not groups.differ(x).any() and not groups.deviation(x).any() and not groups.std(x).any()
        assert groups.mean(x).equal(x)
        assert not groups.normalised(x, 0.0).any()  # which 0 / 0 would not be
        other = torch.cat([x, x + 0.5])  # in a group where others differ they keep their deviation
        groups = Groups(torch.zeros(6, dtype=torch.long), torch.ones(6, 1))
        assert groups.differ(other).all()
        torch.testing.assert_close(
            groups.deviation(other), other - other.mean(), rtol=0, atol=1e-2 * float(other.abs().max())
        )


def test_groups_by_hand() -> None:
    # group 8: 1, 2, 3 -> sum 6, deviations -1, 0, 1, std 1; group 4: alone; the failed row of group 8 counts nowhere
    uid = torch.tensor([8, 4, 8, 8, 8])
    mask = torch.tensor([[1], [1], [0], [1], [1]])
    x = torch.tensor([1.0, 7.0, 100.0, 2.0, 3.0])
    groups = Groups(uid, mask)
    assert groups.size.tolist() == [3, 1, 3, 3, 3]
    assert groups.sum(x).tolist() == [6.0, 7.0, 6.0, 6.0, 6.0]
    assert groups.deviation(x).tolist() == [-1.0, 0.0, 0.0, 0.0, 1.0]
    assert groups.std(x).tolist() == [1.0, 0.0, 1.0, 1.0, 1.0]


def test_group_sums_of_columns() -> None:
    groups = Groups(torch.tensor([1, 2, 1]), torch.ones(3, 2))
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert groups.sum(x).tolist() == [[6.0, 8.0], [3.0, 4.0], [6.0, 8.0]]


def test_groups_equal_torch_on_each_group(make_batch: Callable[..., dict[str, Tensor]]) -> None:
    batch = make_batch(3, rows=30)
    uid, mask = batch["uid"], batch["response_mask"]
    x = torch.randn(30, dtype=torch.float64)
    groups = Groups(uid, mask)
    for name in uid.unique():
        rows = ((uid == name) & mask.any(-1)).nonzero()[:, 0]
        if len(rows) > 1:
            torch.testing.assert_close(groups.deviation(x)[rows], x[rows] - x[rows].mean())
            torch.testing.assert_close(groups.std(x)[rows], x[rows].std().expand(len(rows)))


def test_a_nan_in_a_failed_row_reaches_nobody() -> None:
    groups = Groups(torch.tensor([1, 1, 1]), torch.tensor([[1], [0], [1]]))
    assert groups.deviation(torch.tensor([1.0, NAN, 2.0])).tolist() == [-0.5, 0.0, 0.5]


def test_means_of_segments_by_hand() -> None:
    # runs of sampled positions: (1, 3), then (5); in the second row (2, 4, 6); text between them is nan
    x = torch.tensor([[1.0, 3.0, torch.nan, 5.0], [torch.nan, 2.0, 4.0, 6.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0]])
    assert segment_means(x, mask).tolist() == [[2, 2, 0, 5], [0, 4, 4, 4], [0, 0, 0, 0]]
    leaf = x.masked_fill(mask == 0, 0.0).requires_grad_()
    segment_means(leaf, mask)[0, 0].backward()
    assert leaf.grad is not None and leaf.grad[0].tolist() == [0.5, 0.5, 0, 0]


def test_a_scan_may_have_a_decay_for_each_row() -> None:
    terms, mask = torch.randn(4, 700, dtype=torch.float64), torch.randint(0, 2, (4, 700))
    decays = torch.tensor([0.0, 0.5, 0.9, 1.0], dtype=torch.float64)
    each = torch.cat([reverse_scan(terms[row : row + 1], mask[row : row + 1], float(decays[row])) for row in range(4)])
    assert torch.equal(reverse_scan(terms, mask, decays), each)
