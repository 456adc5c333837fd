# SPDX-License-Identifier: Apache-2.0
"""Choices and log-probs from logits, by hand and by counting."""

from __future__ import annotations

import math

import pytest
import torch

from whet.kernels.sampling import SamplingState, _cut, is_stop, sample, uniforms
from whet.keyed import key
from whet.rollout.protocol import Request, SamplingParams


def state(count: int, **params: object) -> SamplingState:
    made = [Request("", (1,), SamplingParams(5, **params), key(0, "t", i)) for i in range(count)]  # type: ignore[arg-type]
    return SamplingState.of(made, 16, torch.device("cpu"))


def splitmix64(x: int) -> int:
    """Steele, Lea & Flood 2014, in Python's unbounded integers."""
    mask = 2**64 - 1
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


def test_uniforms_are_splitmix64_of_key_and_position() -> None:
    keys = torch.tensor([0, 1, key(3, "a"), 2**62 + 12345])
    positions = torch.tensor([0, 7, 100, 3])
    expected = [
        (splitmix64((k + (p + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 40) / 2**24
        for k, p in zip(keys.tolist(), positions.tolist(), strict=True)
    ]
    assert uniforms(keys, positions).tolist() == expected


def test_frequencies_follow_the_distribution() -> None:
    count = 40_000
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log().expand(count, 4)
    tokens, log_probs = sample(logits, state(count), torch.zeros(count, dtype=torch.int64))
    # 5 standard deviations of a binomial share
    for token, p in enumerate((0.1, 0.2, 0.3, 0.4)):
        assert (tokens == token).float().mean().item() == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / count))
    torch.testing.assert_close(log_probs, torch.tensor([0.1, 0.2, 0.3, 0.4]).log()[tokens])


def test_log_probs_are_before_the_cut_and_after_the_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(200, 4)
    tokens, log_probs = sample(logits, state(200, temperature=0.5, top_k=2), torch.zeros(200, dtype=torch.int64))
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(log_probs, (logits[0] / 0.5).log_softmax(-1)[tokens])


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    # .5 alone is below .7, .5 + .3 is above it: two tokens stay. With .5 exactly reached one stays.
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(300, 4)
    zeros = torch.zeros(300, dtype=torch.int64)
    assert set(sample(logits, state(300, top_p=0.7), zeros)[0].tolist()) == {0, 1}
    assert set(sample(logits, state(300, top_p=0.49), zeros)[0].tolist()) == {0}
    assert set(sample(logits, state(300, top_p=1e-9), zeros)[0].tolist()) == {0}


def test_min_p_keeps_a_share_of_the_likeliest() -> None:
    # of .5, .3, .15, .05 a share of .3 of the likeliest is .15: three stay
    logits = torch.tensor([[0.5, 0.3, 0.1501, 0.0499]]).log().expand(300, 4)
    zeros = torch.zeros(300, dtype=torch.int64)
    assert set(sample(logits, state(300, min_p=0.3), zeros)[0].tolist()) == {0, 1, 2}
    assert set(sample(logits, state(300, min_p=0.31), zeros)[0].tolist()) == {0, 1}
    assert set(sample(logits, state(300, min_p=1.0), zeros)[0].tolist()) == {0}
    # behind min_p the likeliest has .5 / .8 = .625 of what is left, which reaches .62 alone
    assert set(sample(logits, state(300, min_p=0.5, top_p=0.62), zeros)[0].tolist()) == {0}
    assert set(sample(logits, state(300, top_p=0.62), zeros)[0].tolist()) == {0, 1}
    tokens, log_probs = sample(logits, state(300, min_p=0.5), zeros)
    torch.testing.assert_close(log_probs, logits[0].log_softmax(-1)[tokens])


def test_a_row_that_is_not_cut_keeps_all_its_tokens_beside_one_that_is() -> None:
    mixed = [Request("", (1,), SamplingParams(5, top_p=p), 0) for p in (1.0, 0.5)]
    logits = torch.cat([torch.zeros(2, 1), torch.full((2, 5000), -17.0)], 1)  # rounded sums reach 1 early
    of = SamplingState.of(mixed, logits.shape[1], torch.device("cpu"))
    left = _cut(logits.log_softmax(-1), of) > -torch.inf
    assert left.sum(1).tolist() == [5001, 1]


def test_greedy_takes_the_likeliest_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    tokens, log_probs = sample(logits, state(2, temperature=0.0), torch.zeros(2, dtype=torch.int64))
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[[0, 1], [1, 0]])


def test_tokens_without_probability_are_never_chosen() -> None:
    logits = torch.full((5000, 6), float("-inf"))
    logits[:, 2] = 0.0
    tokens, log_probs = sample(logits, state(5000), torch.zeros(5000, dtype=torch.int64))
    assert (tokens == 2).all() and (log_probs == 0).all()


def test_rows_do_not_see_each_other() -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    of = state(6, top_p=0.9, temperature=0.8)
    tokens, log_probs = sample(logits, of, torch.arange(6))
    for row in range(6):
        alone = sample(logits[row : row + 1], of.rows(torch.tensor([row])), torch.tensor([row]))
        assert (alone[0].item(), alone[1].item()) == (tokens[row].item(), log_probs[row].item())


def test_stops_of_unequal_number() -> None:
    made = [Request("", (1,), SamplingParams(5, stop_token_ids=stops), 0) for stops in ((), (3,), (3, 4))]
    of = SamplingState.of(made, 16, torch.device("cpu"))
    assert is_stop(torch.tensor([3, 3, 4]), of.stop_ids).tolist() == [False, True, True]
    assert is_stop(torch.tensor([0, 4, 0]), of.stop_ids).tolist() == [False, False, False]


def test_logits_that_are_no_numbers_give_a_token_and_no_error() -> None:
    made = [Request("", (1,), SamplingParams(5), key(0, "t", i)) for i in range(3)]
    logits = torch.zeros(3, 8)
    logits[1] = float("nan")
    tokens, log_probs = sample(
        logits, SamplingState.of(made, 8, torch.device("cpu")), torch.zeros(3, dtype=torch.int64)
    )
    assert tokens[1] == 0 and bool(log_probs[1].isnan()) and bool(log_probs[[0, 2]].isfinite().all())
