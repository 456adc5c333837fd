# SPDX-License-Identifier: Apache-2.0
"""Weights and rejections worked by hand: x = o - u is log 4, -log 2, 0 and, in a row of its own, log 2."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from whet.algorithms.calls import call
from whet.algorithms.correction import gap, out_of_bounds, weight_metrics
from whet.registry import REJECTIONS, WEIGHTS

LOG2 = math.log(2)
NAN = math.nan
BATCH = {
    "rollout_log_probs": torch.tensor([[-2.0, -1.0, -3.0, NAN], [-1.0, NAN, NAN, NAN], [NAN] * 4], dtype=torch.float64),
    "old_log_probs": torch.tensor(
        [[-2.0 + 2 * LOG2, -1.0 - LOG2, -3.0, NAN], [-1.0 + LOG2, NAN, NAN, NAN], [NAN] * 4], dtype=torch.float64
    ),
    "advantages": torch.tensor([[-1.0, 1.0, -1.0, NAN], [-1.0, NAN, NAN, NAN], [NAN] * 4], dtype=torch.float64),
    "entropy": torch.tensor([[0.1, 0.5, 0.9, NAN], [0.7, NAN, NAN, NAN], [NAN] * 4], dtype=torch.float64),
    "token_level_scores": torch.tensor([[0.0, 0.0, 3.0, NAN], [-1.0, NAN, NAN, NAN], [NAN] * 4], dtype=torch.float64),
    "response_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]),
}
SAMPLED = BATCH["response_mask"] != 0


def weight(name: str, **options: Any) -> list[float]:
    """Of the four sampled tokens."""
    result: Tensor = call(WEIGHTS[name], BATCH, options)
    return result[SAMPLED].tolist()  # type: ignore[no-any-return]


def kept(**options: Any) -> list[bool]:
    result: Tensor = call(REJECTIONS["divergence"], BATCH, options)
    return result.expand(SAMPLED.shape)[SAMPLED].tolist()  # type: ignore[no-any-return]


def test_importance_is_cut_above() -> None:
    assert weight("importance") == pytest.approx([2, 0.5, 1, 2])
    assert weight("importance", cap=10.0) == pytest.approx([4, 0.5, 1, 2])
    # of the sequence: 4 / 2 and 2
    assert weight("importance", level="sequence", cap=1.5) == pytest.approx([1.5] * 4)
    assert weight("importance", level="sequence") == pytest.approx([2] * 4)


def test_importance_may_have_a_floor() -> None:
    assert weight("importance", floor=0.8) == pytest.approx([2, 0.8, 1, 2])
    assert weight("importance", level="sequence", floor=3.0, cap=4.0) == pytest.approx([3] * 4)


def test_importance_of_a_row_or_a_segment_is_a_geometric_mean() -> None:
    # log 4, -log 2, 0: the mean is log 2 / 3; apart at the second token: log 4 and 0
    mean = 2 ** (1 / 3)
    assert weight("importance", level="geometric") == pytest.approx([mean] * 3 + [2])
    assert weight("importance", level="segment") == pytest.approx([mean] * 3 + [2])
    apart = {**BATCH, "response_mask": torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])}
    found: Tensor = call(WEIGHTS["importance"], apart, {"level": "segment", "cap": 9.0})
    assert found[0, [0, 2]].tolist() == pytest.approx([4, 1])
    # normalised over tokens: (mean 3 + 2) / 4
    size = (3 * mean + 2) / 4
    of_tokens = weight("importance", level="segment", normalise=True)
    assert of_tokens == pytest.approx([mean / size] * 3 + [2 / size])


def test_the_spread_of_weights_and_what_is_outside() -> None:
    weights = torch.tensor([[4.0, 0.5, 1.0, 7.0], [2.0, 9.0, 9.0, 9.0], [9.0] * 4])
    found = {name: value.item() for name, value in weight_metrics(weights, SAMPLED).items()}
    # 4, 1/2, 1, 2: mean 15/8, squares 17 + 1/4 + 4 - 4 (15/8)^2
    assert found == {"std": pytest.approx(((16 + 0.25 + 1 + 4) / 4 - (15 / 8) ** 2) ** 0.5), "min": 0.5, "max": 4}
    assert weight_metrics(weights, torch.zeros(3, 4)) == {}
    assert out_of_bounds(weights, SAMPLED, 0.6, 2.0).item() == 0.5  # 4 and 1/2
    assert out_of_bounds(weights, SAMPLED, 0.0, 4.0).item() == 0.0


def test_importance_may_keep_the_size_of_a_step() -> None:
    assert weight("importance", normalise=True) == pytest.approx([each / 1.375 for each in (2, 0.5, 1, 2)])
    # of sequences: without its first token row 0 has 1/2, row 1 has 2, and a row counts once
    fewer = {**BATCH, "response_mask": torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])}
    of_rows: Tensor = call(WEIGHTS["importance"], fewer, {"level": "sequence", "normalise": True})
    assert of_rows[:2, 0].tolist() == pytest.approx([0.4, 1.6])


def test_icepop_drops_what_is_outside_of_its_band() -> None:
    assert weight("icepop", low=0.6, high=3.0) == pytest.approx([0, 0, 1, 2])


def test_top_entropy_takes_a_share_of_all_tokens() -> None:
    # of .1, .5, .7, .9 the 50 % quantile is .6
    assert weight("top_entropy", share=0.5) == [0, 0, 1, 1]


def test_off_policy_sequences_are_not_unlearnt() -> None:
    # means of u - o: log 2 / 3 = .23 and log 2
    swapped = {"old_log_probs": BATCH["rollout_log_probs"], "rollout_log_probs": BATCH["old_log_probs"]}
    for threshold, kept_tokens in ((0.1, [0, 1, 0, 0]), (0.5, [1, 1, 1, 0]), (1.0, [1, 1, 1, 1])):
        found: Tensor = call(WEIGHTS["off_policy_sequence"], {**BATCH, **swapped}, {"threshold": threshold})
        assert found[SAMPLED].tolist() == kept_tokens


def test_pf_ppo_weighs_rows_by_their_score() -> None:
    # scores 3 and -1: squares 9 and 1, mean 5
    assert weight("pf_ppo") == pytest.approx([1.8, 1.8, 1.8, 0.2])
    assert weight("pf_ppo", form="max_min") == pytest.approx([1] * 4)
    assert weight("pf_ppo", form="max_random") == pytest.approx([1.6] * 3 + [0.4])
    # .6 summed in two orders, .5, .3 and 0 in two: the best and the worst are four of six rows
    scores = torch.tensor([0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.5, 0.3, 0.1 + 0.2 - 0.3, 0.0], dtype=torch.float64)
    batch = {"token_level_scores": scores[:, None], "response_mask": torch.ones(6, 1)}
    for form, rows in (("max_min", [1.5, 1.5, 0, 0, 1.5, 1.5]), ("max_random", [2, 2, 0.5, 0.5, 0.5, 0.5])):
        assert call(WEIGHTS["pf_ppo"], batch, {"form": form})[:, 0].tolist() == pytest.approx(rows)


def test_rejection_by_token() -> None:
    # k1: -log 4, log 2, 0, -log 2
    assert kept(form="k1", low=-1.0, high=0.5) == [False, False, True, True]
    # k2: 2 log2^2 = .96, .24, 0, .24
    assert kept(form="k2", high=0.3) == [False, True, True, True]
    # k3: 4 - 1 - log 4 = 1.61, .5 - 1 + log 2 = .19, 0, 2 - 1 - log 2 = .31
    assert kept(form="k3", high=0.3) == [False, True, True, False]
    assert kept() == [True] * 4


def test_rejection_by_sequence() -> None:
    # k3 of row 0: sum 1.81, mean .60, largest 1.61; of row 1 .31
    assert kept(level="sequence_mean", high=0.5) == [False, False, False, True]
    assert kept(level="sequence_sum", high=1.7) == [False, False, False, True]
    assert kept(level="sequence_sum", high=1.9) == [True] * 4
    assert kept(level="sequence_max", high=1.65) == [True] * 4
    assert kept(level="sequence_max", high=1.6) == [False, False, False, True]


def test_the_gap_in_numbers() -> None:
    clean = {name: column.nan_to_num() if column.is_floating_point() else column for name, column in BATCH.items()}
    found = gap(clean["old_log_probs"], clean["rollout_log_probs"], clean["response_mask"])
    assert float(found["abs_mean"]) == pytest.approx(LOG2)  # (2 + 1 + 0 + 1) log 2 / 4
    assert float(found["abs_max"]) == pytest.approx(2 * LOG2)
    k3 = [3 - 2 * LOG2, -0.5 + LOG2, 0.0, 1 - LOG2]
    assert float(found["kl"]) == pytest.approx(sum(k3) / 4)
    # weights 4, 1/2, 1, 2: 7.5^2 / (4 * 21.25)
    assert float(found["effective_sample_size"]) == pytest.approx(56.25 / 85)
    assert float(found["chi2"]) == pytest.approx(21.25 / 4 - 1)
    assert float(found["perplexity_ratio"]) == pytest.approx(math.exp(-2 * LOG2 / 4))
    assert float(found["rollout_perplexity"]) == pytest.approx(math.exp(7 / 4))
    assert float(found["trainer_perplexity"]) == pytest.approx(math.exp(7 / 4 - 2 * LOG2 / 4))
