# SPDX-License-Identifier: Apache-2.0
"""The Bradley-Terry loss by hand, and its gradient by finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from whet.algorithms.preference import bradley_terry


def test_by_hand() -> None:
    # -log sigmoid(x) = log(1 + e^-x): x = 2 - 1, then 2 - 1 - 1 = 0, then 0 - 3 = -3
    chosen, rejected = torch.tensor([2.0, 2.0, 0.0]), torch.tensor([1.0, 1.0, 3.0])
    loss = bradley_terry(chosen, rejected, torch.tensor([0.0, 1.0, 0.0]))
    expected = [math.log(1 + math.exp(-1)), math.log(2), math.log(1 + math.exp(3))]
    assert loss.tolist() == pytest.approx(expected)


def test_the_centre_by_hand() -> None:
    # 0.01 times the squares of 3, 3 and 3 on top
    chosen, rejected = torch.tensor([2.0, 2.0, 0.0]), torch.tensor([1.0, 1.0, 3.0])
    zero = torch.zeros(3)
    apart = bradley_terry(chosen, rejected, zero, center_coef=0.01) - bradley_terry(chosen, rejected, zero)
    assert apart.tolist() == pytest.approx([0.09] * 3, rel=1e-4)


def test_scores_far_apart_stay_finite() -> None:
    loss = bradley_terry(torch.tensor([-1e4, 1e4]), torch.zeros(2), torch.zeros(2))
    assert loss.tolist() == [1e4, 0.0]


def test_the_gradient_is_that_of_finite_differences() -> None:
    draw = torch.Generator().manual_seed(0)
    chosen, rejected, margin = (torch.randn(5, generator=draw, dtype=torch.float64) for _ in range(3))
    chosen, rejected = chosen.requires_grad_(), rejected.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda one, other: bradley_terry(one, other, margin, center_coef=0.1), (chosen, rejected)
    )
