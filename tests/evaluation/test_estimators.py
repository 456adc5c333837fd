# SPDX-License-Identifier: Apache-2.0
"""Numbers by hand, all subsets counted, the intervals' coverage on simulated models."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import combinations, product
from math import prod

import numpy as np
import pytest

from tests.raising import raises
from whet.errors import DataError
from whet.evaluation.estimators import (
    Array,
    best_at_k,
    estimate,
    maj_at_k,
    mean_at_n,
    pass_at_k,
    prompts_needed,
    sign_flip_p,
)


def rows(*values: list[float]) -> Array:
    return np.array(values, dtype=float)


def test_pass_at_k_by_hand() -> None:
    # n = 4, c = 1: of the C(4, 2) = 6 pairs C(3, 2) = 3 miss it.  c = 3: no pair misses.
    right = rows([1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0])
    assert pass_at_k(right, 2).tolist() == [0.5, 1.0, 0.0]
    assert pass_at_k(right, 1).tolist() == [0.25, 0.75, 0.0]
    assert pass_at_k(right, 4).tolist() == [1.0, 1.0, 0.0]


def test_pass_at_k_is_the_published_product() -> None:
    """Chen et al. 2021, figure 3: 1 - prod over i from n-c+1 to n of (1 - k / i), 1 where n - c < k."""
    n = 20
    for c, k in product(range(n + 1), (1, 3, 10, 20)):
        right = rows([1] * c + [0] * (n - c))
        published = 1 if n - c < k else 1 - prod(Fraction(i - k, i) for i in range(n - c + 1, n + 1))
        assert pass_at_k(right, k)[0] == pytest.approx(float(published), abs=1e-15)


def test_best_at_k_and_pass_at_k_are_means_over_all_subsets() -> None:
    scores = np.random.default_rng(0).integers(0, 4, size=(5, 6)) / 3
    for k in range(1, 7):
        subsets = [list(each) for each in combinations(range(6), k)]
        slow = np.mean([scores[:, each].max(1) for each in subsets], axis=0)
        np.testing.assert_allclose(best_at_k(scores, k), slow, atol=1e-15)
        passed = np.mean([(scores[:, each] >= 1).any(1) for each in subsets], axis=0)
        np.testing.assert_allclose(pass_at_k(scores, k), passed, atol=1e-15)
    np.testing.assert_allclose(best_at_k(scores, 1), mean_at_n(scores))


@pytest.mark.parametrize(
    ("scores", "answers", "expected"),
    [
        ([1, 1, 0, 0, 0], ["4", "4", "5", "6", "7"], 1.0),  # two agree on the right one
        ([1, 0, 0], ["4", "5", "5"], 0.0),
        ([1, 0, 1, 0], ["4", "5", "4", "5"], 0.5),  # a tie is chance
        ([1, 0, 0], ["4", "5", "6"], 1 / 3),
        ([1, 0, 0, 0], ["4", None, None, None], 1.0),  # who says nothing does not vote
        ([0, 0], [None, None], 0.0),
        ([1, 0.5, 0], ["4", "4", "5"], 0.75),  # one text, unequally paid: what a member gets on average
    ],
)
def test_a_majority_of_all_by_hand(scores: list[float], answers: list[str | None], expected: float) -> None:
    n = len(scores)
    assert maj_at_k(rows(scores), [answers], n)[0] == pytest.approx(expected)
    assert maj_at_k(rows(scores[::-1]), [answers[::-1]], n)[0] == pytest.approx(expected)  # order says nothing


def test_a_majority_of_some_is_near_the_mean_over_all_subsets() -> None:
    rng = np.random.default_rng(1)
    texts = [[str(each) for each in row] for row in rng.integers(0, 4, size=(60, 7))]
    right = np.array([[float(text == "0") for text in row] for row in texts])
    for k in (1, 3, 5):
        subsets = [list(each) for each in combinations(range(7), k)]
        exact = [
            np.mean([maj_at_k(row[None, each], [[said[i] for i in each]], k)[0] for each in subsets])
            for row, said in zip(right, texts, strict=True)
        ]
        found = maj_at_k(right, texts, k)
        assert abs(found.mean() - np.mean(exact)) < 0.02
        assert (maj_at_k(right, texts, k) == found).all()  # keyed: the same again
    assert (maj_at_k(right, texts, 3, seed=1) != maj_at_k(right, texts, 3)).any()


@pytest.mark.parametrize("k", [0, 4])
def test_more_than_there_is_cannot_be_drawn(k: int) -> None:
    for draw in (pass_at_k, best_at_k, lambda scores, k: maj_at_k(scores, [["", "", ""]], k)):
        with raises(DataError, "k", found=k, expected=re.compile("n=3")):
            draw(rows([1, 0, 0]), k)


@pytest.mark.parametrize(("num_prompts", "n"), [(10, 1), (30, 8), (100, 2)])
def test_an_interval_holds_the_truth_95_times_in_100(num_prompts: int, n: int) -> None:
    """Prompts differ in how hard they are, so answers to one are alike: resampling answers would be too narrow."""
    rng = np.random.default_rng(2)
    held = []
    for trial in range(200):
        chance = rng.beta(2, 2, size=num_prompts)  # mean 0.5
        found = estimate((rng.random((num_prompts, n)) < chance[:, None]).mean(1), seed=trial)
        held.append(found.low <= 0.5 <= found.high)
    assert 0.92 <= np.mean(held) <= 0.985


def test_an_interval_is_that_of_the_central_limit_where_there_are_many() -> None:
    values = (np.arange(2000) % 4 == 0).astype(float)
    found = estimate(values, bounds=(0, 1))
    half = 1.96 * (0.25 * 0.75 / 2000) ** 0.5
    assert found.value == 0.25
    assert (found.low, found.high) == pytest.approx((0.25 - half, 0.25 + half), abs=1e-3)
    assert estimate(values) == found != estimate(values, seed=1)  # keyed


def test_where_all_prompts_agree_the_bounds_say_what_may_be_missed() -> None:
    # (1 - x)^30 = 0.025: 30 prompts in a row that would fail miss a share of x of others
    x = 1 - 0.025 ** (1 / 30)
    none, every, half = (estimate(np.full(30, value), bounds=(0, 1)) for value in (0.0, 1.0, 0.5))
    assert (none.low, none.high) == pytest.approx((0, x)) and x == pytest.approx(0.116, abs=1e-3)
    assert (every.low, every.high) == pytest.approx((1 - x, 1))
    assert (half.low, half.high) == pytest.approx((0.5 - x / 2, 0.5 + x / 2))
    assert estimate(np.full(30, 2.0)).high == 2.0  # nothing is known of what a value could be
    with raises(DataError, "prompts", found=0):
        estimate(np.array([]))


def test_sign_flips_by_hand() -> None:
    # 1 1 1: of 8 swaps only +++ and --- sum to 3 or more.  Prompts without a difference say nothing.
    assert sign_flip_p(np.array([1.0, 0, 1, 0, 1])) == 0.25
    assert sign_flip_p(np.array([1.0, -1])) == 1.0
    assert sign_flip_p(np.zeros(5)) == 1.0
    assert sign_flip_p(np.array([2.0, 1, -1])) == 0.75  # |sum| >= 2 in all but those where 1 and 1 oppose 2


def test_sampled_sign_flips_are_near_the_binomial_test() -> None:
    """For 0/1 scores the test is McNemar's exact one: 30 of 40 differing prompts, twice P(X >= 30)."""
    differences = np.array([1.0] * 30 + [-1.0] * 10 + [0.0] * 160)
    assert sign_flip_p(differences) == pytest.approx(0.00222, abs=0.0015)
    assert sign_flip_p(differences) == sign_flip_p(-differences)
    rng = np.random.default_rng(3)
    false_alarms = [sign_flip_p(rng.integers(-2, 3, size=25) / 2.0, seed=i) < 0.05 for i in range(200)]
    assert np.mean(false_alarms) < 0.1


def test_prompts_needed_by_hand() -> None:
    # differences 1, 0, 0, -1 ... of mean 0.1 and deviation s: ((1.96 + 0.8416) s / 0.1)^2
    differences = np.array([1.0] * 3 + [-1.0] * 1 + [0.0] * 16)
    s = differences.std(ddof=1)
    assert prompts_needed(differences) == pytest.approx((2.8016 * s / 0.1) ** 2, abs=1)
    assert prompts_needed(-differences) == prompts_needed(differences)
    assert prompts_needed(np.zeros(5)) is None and prompts_needed(np.array([1.0])) is None
