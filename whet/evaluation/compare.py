# SPDX-License-Identifier: Apache-2.0
"""Comparison of two models on the same prompts: whether a gain is real or chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from whet.errors import DataError
from whet.evaluation.answers import Record, by_prompt
from whet.evaluation.estimators import LEVEL, Estimate, estimate, prompts_needed, sign_flip_p
from whet.rounding import ABSOLUTE, RELATIVE

SHOWN = 60  # characters of a prompt in an error
EQUAL = 0.05  # largest possible difference, relative to the scale, of models that are called equal


@dataclass(frozen=True)
class Comparison:
    """B compared with A. `difference` is the mean over prompts of B's mean score minus A's, with an interval by
    resampling prompts; `p_value` is from random swaps of A and B within prompts."""

    metric: str
    num_prompts: int
    n: tuple[int, int]  # responses per prompt, of A and of B
    a: Estimate
    b: Estimate
    difference: Estimate
    p_value: float
    a_better: int  # prompts; with one response per prompt McNemar's counts: only A correct, only B correct
    b_better: int
    prompts_needed: int | None  # to detect such a difference with power 0.8; None where there is no difference

    @property
    def is_real(self) -> bool:
        """True where chance is an unlikely explanation: p < 0.05, and the interval does not contain 0."""
        return self.p_value < 1 - LEVEL and not self.difference.low <= 0 <= self.difference.high

    def verdict(self) -> str:
        """The result as a sentence for the user."""
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
    """Formats an accuracy in percent, any other score unchanged."""
    return f"{100 * value:.1f}" if metric == "accuracy" else f"{value:.3g}"


def shown_p(p_value: float) -> str:
    """Formats a p-value; random swaps cannot distinguish values below 0.001."""
    return "< 0.001" if p_value < 0.001 else f"= {p_value:.2g}"


def compare(
    a: Sequence[Record], b: Sequence[Record], *, metric: str = "accuracy", other_prompts: bool = False, seed: int = 0
) -> dict[str, Comparison]:
    """Compares two models over all prompts (key `all`), and over those of each data source if there are several.

    `metric` is accuracy, reward, or the name of a part of the reward; a failed trajectory scores 0. With
    `other_prompts` the prompts' texts may differ.  Raises: DataError that names the difference of the data.
    """
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


def _compare(a: Sequence[Sequence[Record]], b: Sequence[Sequence[Record]], metric: str, seed: int) -> Comparison:
    mean_a, mean_b = (np.array([fmean(_score(row, metric) for row in rows) for rows in each]) for each in (a, b))
    differences = np.where(np.isclose(mean_a, mean_b, RELATIVE, ABSOLUTE), 0.0, mean_b - mean_a)
    bounded = metric == "accuracy"
    return Comparison(
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
    """The part of `text` around the first character that differs from `other`."""
    first = next((i for i, (x, y) in enumerate(zip(text, other, strict=False)) if x != y), min(len(text), len(other)))
    start = max(0, first - SHOWN // 3)
    part = text[start : start + SHOWN]
    return repr(("..." if start else "") + part + ("..." if start + SHOWN < len(text) else ""))
