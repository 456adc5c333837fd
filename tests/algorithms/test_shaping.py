# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from whet.algorithms.shaping import (
    RunningScores,
    linear_map,
    normalise,
    pay_on_last_token,
    scale_truncated,
    soft_overlong,
)


def test_soft_overlong_by_hand() -> None:
    # L_max 100, L_buf 20: up to 80 nothing; 85: -5/20 * 2; 100: -2
    lengths = torch.tensor([1, 80, 85, 100])
    added = soft_overlong(lengths, max_response_length=100, buffer_length=20, penalty=2.0)
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


def paid_at_the_end(scores: list[float], uid: list[int]) -> dict[str, torch.Tensor]:
    mask = torch.tensor([[1, 0, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0]])
    rewards = torch.zeros(4, 3)
    for row, (score, last) in enumerate(zip(scores, (2, 1, 2, 0), strict=True)):
        rewards[row, last] = score
    return {"token_level_rewards": rewards, "response_mask": mask, "uid": torch.tensor(uid)}


def test_scores_are_centred_where_a_row_is_paid() -> None:
    columns = paid_at_the_end([1.0, 3.0, 8.0, 100.0], [7, 7, 8, 8])
    none = RunningScores()
    assert torch.equal(normalise(**columns, running=none), columns["token_level_rewards"])
    by_group = normalise(**columns, running=none, mean="group")
    assert by_group.tolist()[:3] == [[0, 0, -1], [0, 1, 0], [0, 0, 0]]  # the last row failed: it is of no group
    by_batch = normalise(**columns, running=none, mean="batch")
    assert by_batch.tolist()[:3] == [[0, 0, -3], [0, -1, 0], [0, 0, 4]]
    both = normalise(**columns, running=none, mean="group", std="batch")
    deviation = statistics.stdev([1.0, 3.0, 8.0])
    assert float(both[0, 2]) == pytest.approx(-1 / deviation, rel=1e-5)


def test_running_scores_are_those_of_all_steps() -> None:
    running = RunningScores()
    seen: list[float] = []
    for step in range(3):
        columns = paid_at_the_end([1.0 + 5 * step, 3.0, 8.0, 100.0], [7, 7, 8, 8])
        running.update(columns["token_level_rewards"], columns["response_mask"])
        seen += [1.0 + 5 * step, 3.0, 8.0]
    mean, deviation = statistics.fmean(seen), statistics.stdev(seen)
    assert running.mean(torch.zeros(2)).tolist() == pytest.approx([mean, mean])
    assert running.std(torch.zeros(2)).tolist() == pytest.approx([deviation, deviation])
    resumed = RunningScores()
    resumed.load_state(running.state())
    shaped = normalise(**columns, running=resumed, mean="running", std="running")
    assert float(shaped[1, 1]) == pytest.approx((3.0 - mean) / (deviation + 1e-6), rel=1e-5)
    resumed.update(columns["token_level_rewards"][3:], columns["response_mask"][3:])  # nothing sampled, nothing new
    assert resumed.state() == running.state()


def test_a_linear_map_of_scores() -> None:
    # 10 (s - 1/2), on the last sampled token of each row; the failed row stays 0
    columns = paid_at_the_end([1.0, 0.0, 0.5, 0.0], [7, 7, 8, 8])
    mapped = linear_map(columns["token_level_rewards"], columns["response_mask"], scale=10.0, bias=-0.5)
    assert mapped.tolist() == [[0, 0, 5], [0, -5, 0], [0, 0, 0], [0, 0, 0]]


def test_truncated_rows_are_paid_a_share() -> None:
    rewards = torch.tensor([[0.0, 4.0], [1.0, -2.0]])
    cut = torch.tensor([True, False])
    assert scale_truncated(rewards, cut, 0.25).tolist() == [[0, 1], [1, -2]]
    assert scale_truncated(rewards, ~cut, 0.0).tolist() == [[0, 4], [0, 0]]
