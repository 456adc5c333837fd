# SPDX-License-Identifier: Apache-2.0
"""Short answers as text: exact match."""

from __future__ import annotations

import re
import unicodedata

from whet.registry import register_reward
from whet.rewards.result import entries, truth_error

ARTICLES = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)


@register_reward("exact_match")
def exact_match(
    solution_str: str,
    ground_truth: object,
    *,
    after: str | None = None,
    before: str | None = None,
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    ignore_articles: bool = False,
) -> dict[str, float | str | None]:
    """1 if the answer equals the ground truth, or one of a list of ground truths, else 0.

    Before the comparison both are normalised to Unicode NFKC, with each run of white space as one space. If `after`
    (`</think>`, `Answer:`) is set, the answer is the text after its last occurrence; without one the reward is 0. If
    `before` (`</answer>`) is set too, the answer ends at its first occurrence, and the reward is 0 without one:
    `<answer>London</answer>` has the answer London. `ignore_articles` is for English; text of only articles or
    punctuation keeps them. `pred` is the normalised answer.  Raises: ValueError for an empty list of ground truths, and
    if one is None."""
    listed = entries(ground_truth)
    truths = [ground_truth] if listed is None else listed
    if not truths or None in truths:
        raise truth_error(ground_truth, "a text, or a list of texts of which one is enough")
    _, begins, answer = solution_str.rpartition(after) if after is not None else ("", "-", solution_str)
    answer, ends, _ = answer.partition(before) if before is not None else (answer, "-", "")
    if not (begins and ends):
        return {"reward": 0.0, "pred": None}

    def plain(text: str) -> str:
        text = unicodedata.normalize("NFKC", text)
        whole = left = text.casefold() if ignore_case else text
        if ignore_punctuation:
            left = "".join(each for each in left if not unicodedata.category(each).startswith("P"))
        if ignore_articles:
            left = ARTICLES.sub(" ", left)
        return " ".join(left.split()) or " ".join(whole.split())

    pred = plain(answer)
    return {"reward": float(any(plain(str(truth)) == pred for truth in truths)), "pred": pred}
