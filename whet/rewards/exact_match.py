# SPDX-License-Identifier: Apache-2.0
"""Exact match of the answer and the ground truth as text."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

from numpy import ndarray

from whet.registry import register_reward
from whet.rewards.result import truth_error

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.IGNORECASE)


@register_reward("exact_match")
def compute_score(
    solution_str: str,
    ground_truth: Any,
    *,
    after: str | None = None,
    before: str | None = None,
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    ignore_articles: bool = False,
) -> dict[str, float | str | None]:
    """1 where the answer equals the ground truth, or one of the list of ground truths, else 0.

    Before the comparison both are normalised to Unicode NFKC, with each run of white space as one space. Where `after`
    (`</think>`, `Answer:`) is set, the answer is the text after its last occurrence; without one the reward is 0.
    Where `before` (`</answer>`) is set too, the answer ends at its first occurrence, and the reward is 0 without one:
    `<answer>London</answer>` has the answer London.
    `ignore_articles` is for English; text of only articles or punctuation keeps them. `pred` is the normalised answer.
    Raises: ValueError for an empty list of ground truths, and where one is None.
    """
    ground_truth = ground_truth.tolist() if isinstance(ground_truth, ndarray) else ground_truth
    truths = list(ground_truth) if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    if not truths or None in truths:
        raise truth_error(ground_truth, "a text, or a list of texts of which one is enough")
    if after is not None:
        _, mark, solution_str = solution_str.rpartition(after)
        if not mark:
            return {"reward": 0.0, "pred": None}
    if before is not None:
        solution_str, mark, _ = solution_str.partition(before)
        if not mark:
            return {"reward": 0.0, "pred": None}

    def normalise(text: str) -> str:
        text = unicodedata.normalize("NFKC", text)
        whole = left = text.casefold() if ignore_case else text
        if ignore_punctuation:
            left = "".join(each for each in left if not unicodedata.category(each).startswith("P"))
        if ignore_articles:
            left = _ARTICLES.sub(" ", left)
        return " ".join(left.split()) or " ".join(whole.split())

    answer = normalise(solution_str)
    return {"reward": float(any(normalise(str(truth)) == answer for truth in truths)), "pred": answer}
