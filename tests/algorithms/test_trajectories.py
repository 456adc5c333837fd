# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re

import torch

from tests.raising import raises
from whet.algorithms.calls import TrajectoryLayout
from whet.errors import DataError

# trajectory 7 has rows 0 and 2, trajectory 3 has row 1, all of trajectory 5 failed
UID = torch.tensor([7, 3, 7, 5])
MASK = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]])


def test_rows_are_laid_end_to_end_without_what_was_not_sampled() -> None:
    column = torch.arange(16.0).reshape(4, 4)
    layout = TrajectoryLayout(UID, MASK)
    # trajectories in the order of their numbers: 3, 5, 7
    assert layout.join("x", column).tolist() == [[4, 5, 0, 0, 0], [0, 0, 0, 0, 0], [0, 2, 9, 10, 11]]
    assert layout.join("response_mask", MASK).tolist() == [[1, 1, 0, 0, 0], [0] * 5, [1] * 5]


def test_cutting_undoes_joining() -> None:
    column = torch.arange(1.0, 17.0).reshape(4, 4)
    layout = TrajectoryLayout(UID, MASK)
    assert torch.equal(layout.cut(layout.join("x", column)), column * MASK)
    assert layout.cut(torch.tensor([3.0, 5.0, 7.0])).tolist() == [7.0, 3.0, 7.0, 5.0]


def test_one_value_a_row_becomes_one_a_trajectory() -> None:
    layout = TrajectoryLayout(UID, MASK)
    assert layout.join("uid", torch.tensor([20, 21, 20, 22])).tolist() == [21, 22, 20]
    parts = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [0.0, 0.0]])
    assert layout.join("reward_parts", parts).tolist() == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]


def test_parts_of_the_reward_are_no_tokens_even_where_there_are_as_many() -> None:
    parts = torch.tensor([[1.0, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0], [1.0, 2.0, 5.0, 6.0], [0.0, 0.0, 0.0, 0.0]])
    joined = TrajectoryLayout(UID, MASK).join("reward_parts", parts)
    assert joined.tolist() == [[3.0, 4.0, 7.0, 8.0], [0.0] * 4, [1.0, 2.0, 5.0, 6.0]]


def test_rows_that_contradict_each_other_are_refused() -> None:
    with raises(DataError, "column 'uid'", found=re.compile("rows 0 and 2$")):
        TrajectoryLayout(UID, MASK).join("uid", torch.tensor([20, 21, 23, 22]))


def test_a_batch_of_failures_has_a_layout() -> None:
    layout = TrajectoryLayout(torch.tensor([1, 1]), torch.zeros(2, 3))
    assert layout.join("x", torch.ones(2, 3)).tolist() == [[0.0]]
    assert layout.cut(torch.ones(1, 1)).tolist() == [[0.0] * 3] * 2
