# SPDX-License-Identifier: Apache-2.0
"""Returns of turns, worked by hand: two rows of a group, with two turns and one turn, and a row alone."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.algorithms.calling import estimate
from whet.registry import ADV_ESTIMATORS

# row 0: turn 0 samples two tokens and earns 1, a tool writes one, turn 1 samples one and earns 4; padding
# row 1: one turn of two tokens that earns 2;  row 2, of another prompt: one turn that earns 8
BATCH = {
    "token_level_rewards": torch.tensor(
        [[0.0, 1.0, torch.nan, 4.0, torch.nan], [2.0, 0.0, torch.nan, torch.nan, torch.nan], [8.0] + [torch.nan] * 4],
        dtype=torch.float64,
    ),
    "turn_ids": torch.tensor([[0, 0, -1, 1, -1], [0, 0, -1, -1, -1], [0, -1, -1, -1, -1]]),
    "state_hash": torch.tensor([[11, 11, 0, 12, 0], [11, 11, 0, 0, 0], [11, 0, 0, 0, 0]]),
    "response_mask": torch.tensor([[1, 1, 0, 1, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]),
    "uid": torch.tensor([5, 5, 6]),
}


def advantages(name: str, **options: Any) -> Tensor:
    return estimate(ADV_ESTIMATORS[name], BATCH, options).advantages


def test_every_token_of_a_turn_has_the_turns_return() -> None:
    # with gamma 1/2 turn 0 is worth 1 + 4/2
    expected = [[3, 3, 0, 4, 0], [2, 2, 0, 0, 0], [8, 0, 0, 0, 0]]
    assert advantages("segment_reinforce", gamma=0.5).tolist() == expected


def test_turns_are_compared_with_all_turns_of_the_group() -> None:
    returns = [3.0, 4.0, 2.0]
    deviation = statistics.stdev(returns) + 1e-6
    got = advantages("step_reinforce", gamma=0.5)
    assert [float(got[0, 0]), float(got[0, 3]), float(got[1, 0])] == pytest.approx(
        [(each - 3.0) / deviation for each in returns]
    )
    assert got[2].tolist() == [0] * 5


def test_gigpo_adds_what_the_same_state_led_to() -> None:
    # episodes: 5 and 2, mean 3.5. State 11 of prompt 5 was left with 1 + 4/2 = 3 and with 2, mean 2.5; state 12 once,
    # as was state 11 of prompt 6
    plain = advantages("gigpo", gamma=0.5, std_norm=False)
    assert plain.tolist() == [[2.0, 2.0, 0, 1.5, 0], [-2.0, -2.0, 0, 0, 0], [0] * 5]
    steps = advantages("gigpo", gamma=0.5, std_norm=False, episode_weight=0.0, step_weight=2.0)
    assert steps.tolist() == [[1.0, 1.0, 0, 0, 0], [-1.0, -1.0, 0, 0, 0], [0] * 5]
    # of two numbers the deviation is their distance over sqrt 2
    normed = advantages("gigpo", gamma=0.5)
    assert float(normed[0, 0]) == pytest.approx(2 / 2**0.5, abs=1e-5)
