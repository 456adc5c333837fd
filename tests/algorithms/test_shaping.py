# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whet.algorithms.shaping import pay_on_last_token
from whet.registry import SHAPINGS, call


def test_soft_overlong_by_hand() -> None:
    # L_max 100, L_buf 20: up to 80 nothing; 85: -5/20 * 2; 100: -2
    lengths = {"response_lengths": torch.tensor([1, 80, 85, 100])}
    supplied = {"max_response_length": 100}
    added = call(SHAPINGS["soft_overlong"], lengths, {"buffer_length": 20, "penalty": 2.0}, supplied)
    assert added.tolist() == [0.0, 0.0, -0.5, -2.0]


def test_a_score_is_paid_on_the_last_sampled_token_of_its_own_row() -> None:
    # text of a tool after it, an EOS alone, a failed row, a full row
    mask = torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    paid = pay_on_last_token(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert paid.tolist() == [[0, 0, 1, 0], [2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 4]]
    assert paid.dtype == torch.float32


def test_paying_keeps_every_row_sum(make_batch: Callable[..., dict[str, Tensor]]) -> None:
    mask = make_batch(0, rows=30)["response_mask"]
    scores = torch.randn(30, dtype=torch.float64)
    assert torch.equal(pay_on_last_token(scores, mask).sum(-1), scores * mask.any(-1))
