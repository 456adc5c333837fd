# SPDX-License-Identifier: Apache-2.0
"""Estimates from n responses to each of P prompts: mean@n, best@k, pass@k, maj@k, with intervals. Also compares two
models on the same prompts, with a significance test of their difference.

Every metric is one number per prompt [P]; its estimate is the mean over prompts. Intervals describe the variation
between sets of prompts: they resample prompts, each with all of its responses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np
from numpy.typing import NDArray

from whet.errors import DataError
from whet.evaluation.answers import Record, by_prompt
from whet.keyed import key
from whet.rounding import ABSOLUTE, RELATIVE

Array = NDArray[np.float64]
LEVEL = 0.95
RESAMPLES = 2000
SUBSETS = 200  # random subsets of k out of n responses for maj@k
FLIPS = 10_000
EXACT_FLIPS = 14  # largest number of prompts for which all 2^P sign flips are enumerated
POWER = 0.8
SHOWN = 60  # characters of a prompt in an error
EQUAL = 0.05  # models are called equal if their difference is at most this share of the scale
_CHUNK = 2**22  # numbers drawn at once


@dataclass(frozen=True)
class MeanEstimate:
    """A mean over prompts and its 95 % interval."""

    value: float
    low: float
    high: float


def mean_at_n(scores: Array) -> Array:
    """Averages over the responses to each prompt.   [P, n] -> [P]"""
    return scores.mean(1)


def best_at_k(scores: Array, k: int) -> Array:
    """The expected score of the best of k responses, drawn from the n of a prompt without replacement.   [P, n] -> [P]

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


def estimate(values: Array, *, bounds: tuple[float, float] | None = None, seed: int = 0) -> MeanEstimate:
    """Averages one number per prompt; a percentile interval comes from RESAMPLES bootstrap samples of the prompts.

    The percentiles are widened for small P (Hesterberg 2015, arXiv:1411.5279: the expanded percentile interval). If
    all values are equal, resampling shows no variation. With `bounds` of the possible values, the interval then covers
    the share of prompts with other values that P draws may miss (0 of 30 correct: up to 12 %).  Raises: DataError."""
    num_prompts = len(values)
    if num_prompts == 0:
        raise DataError("prompts", 0, "at least one, for a mean")
    value = float(values.mean())
    if (values == values[0]).all():
        least, most = bounds or (value, value)
        missed = 1.0 - ((1 - LEVEL) / 2) ** (1 / num_prompts)
        return MeanEstimate(value, value - missed * (value - least), value + missed * (most - value))
    rng = np.random.default_rng(key(seed, "bootstrap", num_prompts))
    rows = max(1, _CHUNK // num_prompts)
    means = [
        values[rng.integers(num_prompts, size=(min(rows, RESAMPLES - start), num_prompts))].mean(1)
        for start in range(0, RESAMPLES, rows)
    ]
    tail = _widened_tail(num_prompts)
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return MeanEstimate(value, float(low), float(high))


def sign_flip_p(differences: Array, *, seed: int = 0) -> float:
    """Two-sided p-value of the hypothesis that both models are equally good: the share of random swaps of the two
    models' results within prompts whose mean difference is at least the observed one.   [P] -> [0, 1]

    With up to EXACT_FLIPS prompts that differ, counts all 2^P swaps; with more, FLIPS random swaps (by a fixed key) and
    the observed results."""
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
    """Number of prompts at which a difference of this size would be significant with probability 0.8 (the power).

    ((z_0.975 + z_0.8) sd / mean)^2; None without a difference."""
    mean = float(differences.mean())
    if len(differences) < 2 or mean == 0:
        return None
    quantiles = NormalDist().inv_cdf((1 + LEVEL) / 2) + NormalDist().inv_cdf(POWER)
    return max(2, math.ceil((quantiles * float(differences.std(ddof=1)) / mean) ** 2))


def _checked(scores: Array, k: int) -> int:
    """Checks that k of n responses can be drawn.  Returns n."""
    n = scores.shape[1]
    if not 1 <= k <= n:
        raise DataError("k", k, f"1 to n={n}, the responses per prompt", f"sample {k} or more, or lower k")
    return n


def _majority_score(scores: Array, texts: Sequence[str | None], subsets: NDArray[np.int64]) -> float:
    """Averages, over subsets, the score of the answer with most votes. A text's score is the mean of its scores."""
    names = list(dict.fromkeys(text for text in texts if text is not None))
    votes = np.array([[text == name for name in names] for text in texts], dtype=np.float64)  # [n, names]
    if not names:
        return 0.0
    by_name = scores @ votes / votes.sum(0)
    counts = votes[subsets].sum(1)  # [subsets, names]
    leads = (counts == counts.max(1, keepdims=True)) & (counts > 0)
    return float(((leads @ by_name) / np.maximum(leads.sum(1), 1)).mean())


def _widened_tail(num_prompts: int) -> float:
    """The probability of each tail: of a normal variable above t sqrt(P / (P-1)), t of P-1 degrees of freedom."""
    z, freedom = NormalDist().inv_cdf((1 + LEVEL) / 2), num_prompts - 1
    # The quantile of Student's t from the normal's: Abramowitz and Stegun 26.7.5.
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return NormalDist().cdf(-t * math.sqrt(num_prompts / freedom))


@dataclass(frozen=True)
class ScoreComparison:
    """Compares model B with model A. `difference` is the mean over prompts of B's mean score minus A's. Its interval
    comes from resampled prompts, `p_value` from random swaps of A and B within prompts."""

    metric: str
    num_prompts: int
    n: tuple[int, int]  # responses per prompt of A, and of B
    a: MeanEstimate
    b: MeanEstimate
    difference: MeanEstimate
    p_value: float
    a_better: int  # number of prompts with a higher score of A (with one response per prompt: McNemar's counts)
    b_better: int  # number of prompts with a higher score of B
    prompts_needed: int | None  # to detect such a difference with power 0.8; None without a difference

    @property
    def is_real(self) -> bool:
        """Tells whether the difference is unlikely to be chance: p < 0.05, and the interval does not contain 0."""
        return self.p_value < 1 - LEVEL and not self.difference.low <= 0 <= self.difference.high

    def verdict(self) -> str:
        """Returns the result as a sentence for the user."""
        value = self.difference.value
        unit = "points" if self.metric == "accuracy" else self.metric
        low, high = (shown(each, self.metric) for each in (self.difference.low, self.difference.high))
        if value == 0:
            whole = 1.0 if self.metric == "accuracy" else max(abs(self.a.value), abs(self.b.value))
            is_wide = max(-self.difference.low, self.difference.high) > EQUAL * whole
            interval = f"the 95 % interval of their difference is {low} to {high} {unit}"
            if is_wide:
                return (
                    f"A and B score the same, but {self.num_prompts} prompts are too few to tell them apart: {interval}"
                )
            return f"A and B are equally good on these {self.num_prompts} prompts: {interval}"
        size = f"{shown(abs(value), self.metric)} {unit} {'better' if value > 0 else 'worse'}"
        found = f"B is {size} (95 % interval {low} to {high}, p {shown_p(self.p_value)})"
        if self.is_real:
            return f"{found}: the {'gain' if value > 0 else 'loss'} is real"
        unclear = f"{found}: that cannot be told from chance with {self.num_prompts} prompts"
        if self.prompts_needed is None:
            return unclear
        needed = round(self.prompts_needed, 2 - len(str(self.prompts_needed)))  # two significant digits
        return f"{unclear}; about {needed:,} would be needed to see such a difference"


def shown(value: float, metric: str) -> str:
    """Formats an accuracy in percent, and any other score unchanged."""
    return f"{100 * value:.1f}" if metric == "accuracy" else f"{value:.3g}"


def shown_p(p_value: float) -> str:
    """Formats a p-value; random swaps cannot resolve values below 0.001."""
    return "< 0.001" if p_value < 0.001 else f"= {p_value:.2g}"


def compare(
    a: Sequence[Record], b: Sequence[Record], *, metric: str = "accuracy", other_prompts: bool = False, seed: int = 0
) -> dict[str, ScoreComparison]:
    """Compares two models over all prompts (key `all`), and over each data source if there are several.

    `metric` is accuracy, reward, or the name of a part of the reward; a failed trajectory scores 0. With
    `other_prompts` the prompts' texts may differ.  Raises: DataError if the data differ, with the difference."""
    one, other = by_prompt(a), by_prompt(b)
    _check_same_prompts(one, other, other_prompts)
    sources = {index: rows[0]["data_source"] for index, rows in one.items()}
    parts = {"all": list(sources)}
    if len(set(sources.values())) > 1:
        parts |= {name: [i for i in sources if sources[i] == name] for name in sorted(set(sources.values()))}
    return {
        name: _compare([one[i] for i in indices], [other[i] for i in indices], metric, seed)
        for name, indices in parts.items()
    }


def _compare(a: Sequence[Sequence[Record]], b: Sequence[Sequence[Record]], metric: str, seed: int) -> ScoreComparison:
    mean_a, mean_b = (np.array([fmean(_score(row, metric) for row in rows) for rows in each]) for each in (a, b))
    differences = np.where(np.isclose(mean_a, mean_b, RELATIVE, ABSOLUTE), 0.0, mean_b - mean_a)
    bounded = metric == "accuracy"
    return ScoreComparison(
        metric=metric,
        num_prompts=len(differences),
        n=(len(a[0]), len(b[0])),
        a=estimate(mean_a, bounds=(0.0, 1.0) if bounded else None, seed=seed),
        b=estimate(mean_b, bounds=(0.0, 1.0) if bounded else None, seed=seed),
        difference=estimate(differences, bounds=(-1.0, 1.0) if bounded else None, seed=seed),
        p_value=sign_flip_p(differences, seed=seed),
        a_better=int((differences < 0).sum()),
        b_better=int((differences > 0).sum()),
        prompts_needed=prompts_needed(differences),
    )


def _score(row: Record, metric: str) -> float:
    if row["failure"] is not None:
        return 0.0
    numbers = {**row.get("parts", {}), "accuracy": row["accuracy"], "reward": row["reward"]}
    if numbers.get(metric) is None:
        raise DataError(f"response {row.get('uid')}", f"no number {metric!r}", f"one of {', '.join(sorted(numbers))}")
    return float(numbers[metric])


def _check_same_prompts(
    a: Mapping[int, Sequence[Record]], b: Mapping[int, Sequence[Record]], other_prompts: bool
) -> None:
    for name, missing in (("A", sorted(b.keys() - a.keys())), ("B", sorted(a.keys() - b.keys()))):
        if missing:
            rows = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            found = f"{len(a)} and {len(b)}; {name} lacks {len(missing)} of the other's (rows {rows} of the data)"
            change = "evaluate both with the same data.val_files and data.val_max_prompts"
            raise DataError("prompts of A and B", found, "the same prompts", change)
    for index in a:
        one, other = a[index][0], b[index][0]
        for field in ("data_source", "ground_truth"):
            if one[field] != other[field]:
                found = f"{one[field]!r} in A and {other[field]!r} in B"
                raise DataError(f"row {index} of the data: {field}", found, change="evaluate both on the same data")
        if one["prompt"] != other["prompt"] and not other_prompts:
            left, right = _around(one["prompt"], other["prompt"]), _around(other["prompt"], one["prompt"])
            same = "evaluate both with the same data.format_prompt, data.system_prompt and chat template"
            change = f"{same}, or allow the difference with --other-prompts"
            raise DataError(f"row {index} of the data: prompt", f"{left} in A and {right} in B", change=change)


def _around(text: str, other: str) -> str:
    """Returns the part of `text` around the first character that differs from `other`."""
    first = next((i for i, (x, y) in enumerate(zip(text, other, strict=False)) if x != y), min(len(text), len(other)))
    start = max(0, first - SHOWN // 3)
    part = text[start : start + SHOWN]
    return repr(("..." if start else "") + part + ("..." if start + SHOWN < len(text) else ""))
