# SPDX-License-Identifier: Apache-2.0
"""Rows as the model reads them: the shift by one, worked by hand."""

from __future__ import annotations

import pytest
import torch

from whet.errors import DataError
from whet.models.packing import layout


def batch() -> dict[str, torch.Tensor]:
    # row 0: prompt 11 12, response 13 14 15, of which 14 is tool text
    # row 1: failed, nothing sampled
    # row 2: prompt 31, response 32 (left and right padding)
    return {
        "input_ids": torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 0, 0], [0, 31, 32, 0, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0]]),
        "position_ids": torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 2, 2], [0, 0, 1, 1, 1]]),
        "response_mask": torch.tensor([[1, 0, 1], [0, 0, 0], [1, 0, 0]]),
    }


def test_every_real_token_is_read_once_and_rows_without_samples_not_at_all() -> None:
    where = layout(batch())
    assert where.input_ids.tolist() == [11, 12, 13, 14, 15, 31, 32]
    assert where.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert (where.num_rows, where.width, where.shape) == (2, 5, (3, 3))
    assert where.pad(where.input_ids).tolist() == [[11, 12, 13, 14, 15], [31, 32, 0, 0, 0]]


def test_a_sampled_token_belongs_to_the_state_one_token_earlier() -> None:
    where = layout(batch())
    # 13 was chosen after 12 (flat token 1), 15 after the tool's 14 (token 3), 32 after 31 (token 5)
    assert where.targets.tolist() == [13, 15, 32]
    assert where.states.tolist() == [1, 3, 5]
    assert where.to_columns(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1, 0, 2], [0, 0, 0], [3, 0, 0]]


def test_pad_and_unpad_are_inverse_and_so_are_their_gradients() -> None:
    where = layout(batch())
    flat = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(where.unpad(where.pad(flat)), flat)
    assert torch.autograd.gradcheck(lambda x: where.pad(x).square(), flat)
    assert torch.autograd.gradcheck(lambda x: where.unpad(where.pad(x) * 2).square(), flat)


def test_a_response_without_a_prompt_is_refused() -> None:
    bad = batch()
    bad["attention_mask"][2, 1] = 0
    with pytest.raises(DataError, match="no token before it"):
        layout(bad)


def test_nothing_sampled_at_all() -> None:
    empty = batch()
    empty["response_mask"] = torch.zeros_like(empty["response_mask"])
    where = layout(empty)
    assert where.num_rows == 0 and len(where.targets) == 0
