# SPDX-License-Identifier: Apache-2.0
"""Estimates from n responses to each of P prompts: mean@n, best@k, pass@k, maj@k, with intervals.

Every metric is one number per prompt [P]; its estimate is the mean over prompts. Intervals describe the variation
between sets of prompts: they resample prompts, each with all of its responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from whet.errors import DataError
from whet.keyed import key

Array = NDArray[np.float64]
LEVEL = 0.95
RESAMPLES = 2000
SUBSETS = 200  # random subsets of k out of n responses for maj@k
FLIPS = 10_000
EXACT_FLIPS = 14  # largest number of prompts for which all 2^P sign flips are enumerated
POWER = 0.8
_CHUNK = 2**22  # numbers drawn at once


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its 95 % interval."""

    value: float
    low: float
    high: float


def mean_at_n(scores: Array) -> Array:
    """The mean over the responses to each prompt.   [P, n] -> [P]"""
    return scores.mean(1)


def best_at_k(scores: Array, k: int) -> Array:
    """The expected best of k responses drawn from a prompt's n without replacement.   [P, n] -> [P]

    sum_j s_(j) C(j-1, k-1) / C(n, k) over the scores in ascending order: s_(j) is the best of C(j-1, k-1) subsets.
    """
    n = _checked(scores, k)
    weights = [math.comb(j - 1, k - 1) / math.comb(n, k) for j in range(1, n + 1)]
    return np.sort(scores, axis=1) @ np.array(weights)


def pass_at_k(accuracy: Array, k: int) -> Array:
    """Probability that one of k responses is correct: 1 - C(n-c, k) / C(n, k) with c of n correct.   [P, n] -> [P]
    Chen et al. 2021, arXiv:2107.03374: unbiased, unlike 1 - (1 - c/n)^k."""
    n = _checked(accuracy, k)
    by_count = np.array([1.0 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)])
    return by_count[(accuracy >= 1.0).sum(1)]


def maj_at_k(scores: Array, answers: Sequence[Sequence[str | None]], k: int, *, seed: int = 0) -> Array:
    """The expected score of the majority answer of k responses to a prompt.   [P, n], extracted texts [P][n] -> [P]

    Answers with equal text are the same. A tie counts as the mean of the tied answers. An answer of None has no vote;
    without votes the score is 0. With k < n it is the mean over SUBSETS random subsets of k responses (with a fixed
    key), drawn without replacement: unbiased, but not exact.
    """
    n = _checked(scores, k)
    rng = np.random.default_rng(key(seed, "maj", n))
    subsets = rng.permuted(np.tile(np.arange(n), (1 if k == n else SUBSETS, 1)), axis=1)[:, :k]
    return np.array([_majority_score(row, texts, subsets) for row, texts in zip(scores, answers, strict=True)])


def estimate(values: Array, *, bounds: tuple[float, float] | None = None, seed: int = 0) -> Estimate:
    """The mean of one number per prompt, with the percentile interval of RESAMPLES bootstrap samples of the prompts.

    The percentiles are widened for small P (Hesterberg 2015, arXiv:1411.5279: the expanded percentile interval). Where
    all values are equal, resampling shows no variation; with `bounds` of the possible values, the interval then allows
    for the fraction of other prompts that P draws may miss (0 of 30 correct: up to 12 %).  Raises: DataError.
    """
    num_prompts = len(values)
    if num_prompts == 0:
        raise DataError("prompts", 0, "at least one, for a mean")
    value = float(values.mean())
    if (values == values[0]).all():
        least, most = bounds or (value, value)
        missed = 1.0 - ((1 - LEVEL) / 2) ** (1 / num_prompts)
        return Estimate(value, value - missed * (value - least), value + missed * (most - value))
    rng = np.random.default_rng(key(seed, "bootstrap", num_prompts))
    rows = max(1, _CHUNK // num_prompts)
    means = [
        values[rng.integers(num_prompts, size=(min(rows, RESAMPLES - start), num_prompts))].mean(1)
        for start in range(0, RESAMPLES, rows)
    ]
    tail = _widened_tail(num_prompts)
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


def sign_flip_p(differences: Array, *, seed: int = 0) -> float:
    """Two-sided p-value of the hypothesis that both models are equally good: the fraction of random swaps of the two
    models' results within prompts with a mean difference at least as large as the observed one.   [P] -> [0, 1]

    All 2^P swaps for up to EXACT_FLIPS prompts that differ, else FLIPS random ones (with a fixed key) and the observed.
    """
    differing = differences[differences != 0]
    size = len(differing)
    observed = abs(float(differing.sum())) * (1 - 1e-12)  # sums in another order may be smaller by rounding
    if size <= EXACT_FLIPS:
        signs = ((np.arange(2**size)[:, None] >> np.arange(size)) & 1) * 2.0 - 1.0
        return float((np.abs(signs @ differing) >= observed).mean())
    rng = np.random.default_rng(key(seed, "sign flips", size))
    rows = max(1, _CHUNK // size)
    hits = 0
    for start in range(0, FLIPS, rows):
        signs = rng.integers(0, 2, size=(min(rows, FLIPS - start), size)) * 2.0 - 1.0
        hits += int((np.abs(signs @ differing) >= observed).sum())
    return (1 + hits) / (1 + FLIPS)


def prompts_needed(differences: Array) -> int | None:
    """Number of such prompts with which a difference of this size is significant with probability 0.8 (the power).

    ((z_0.975 + z_0.8) sd / mean)^2; None where there is no difference.
    """
    mean = float(differences.mean())
    if len(differences) < 2 or mean == 0:
        return None
    quantiles = NormalDist().inv_cdf((1 + LEVEL) / 2) + NormalDist().inv_cdf(POWER)
    return max(2, math.ceil((quantiles * float(differences.std(ddof=1)) / mean) ** 2))


def _checked(scores: Array, k: int) -> int:
    """Returns n; checks that k of n responses can be drawn."""
    n = scores.shape[1]
    if not 1 <= k <= n:
        raise DataError("k", k, f"1 to n={n}, the responses per prompt", f"sample {k} or more, or lower k")
    return n


def _majority_score(scores: Array, texts: Sequence[str | None], subsets: NDArray[np.int64]) -> float:
    """Mean over subsets of the score of the answer with most votes; the score of a text is the mean of its scores."""
    names = list(dict.fromkeys(text for text in texts if text is not None))
    votes = np.array([[text == name for name in names] for text in texts], dtype=np.float64)  # [n, names]
    if not names:
        return 0.0
    by_name = scores @ votes / votes.sum(0)
    counts = votes[subsets].sum(1)  # [subsets, names]
    leads = (counts == counts.max(1, keepdims=True)) & (counts > 0)
    return float(((leads @ by_name) / np.maximum(leads.sum(1), 1)).mean())


def _widened_tail(num_prompts: int) -> float:
    """Probability in each tail: of a normal beyond t sqrt(P / (P-1)), with t of P-1 degrees of freedom."""
    z, freedom = NormalDist().inv_cdf((1 + LEVEL) / 2), num_prompts - 1
    # The quantile of Student's t from the normal's: Abramowitz and Stegun 26.7.5.
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return NormalDist().cdf(-t * math.sqrt(num_prompts / freedom))
