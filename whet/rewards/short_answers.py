# SPDX-License-Identifier: Apache-2.0
"""Short answers as text: exact match, and the exact match and token F1 of questions after SQuAD's normalisation."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Literal

from whet.registry import register_reward
from whet.rewards.result import after_thought, entries, truth_error

# Punctuation, but not the minus sign of -5 nor the point of 4.2: SQuAD's own rule makes 5 and 42 of them.
_PUNCTUATION = re.compile(rf"(?!(?<!\w)-?\.?\d|(?<=\d)\.\d)[{re.escape(string.punctuation)}]")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b", re.IGNORECASE)


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
    """1 where the answer equals the ground truth, or one of the list of ground truths, else 0.

    Before the comparison both are normalised to Unicode NFKC, with each run of white space as one space. Where `after`
    (`</think>`, `Answer:`) is set, the answer is the text after its last occurrence; without one the reward is 0.
    Where `before` (`</answer>`) is set too, the answer ends at its first occurrence, and the reward is 0 without one:
    `<answer>London</answer>` has the answer London.
    `ignore_articles` is for English; text of only articles or punctuation keeps them. `pred` is the normalised answer.
    Raises: ValueError for an empty list of ground truths, and where one is None.
    """
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
            left = _ARTICLES.sub(" ", left)
        return " ".join(left.split()) or " ".join(whole.split())

    pred = plain(answer)
    return {"reward": float(any(plain(str(truth)) == pred for truth in truths)), "pred": pred}


@register_reward(
    "search_qa", rows_checked_by="whet.rewards.short_answers:read_truths", aliases={"search_qa_f1": {"metric": "f1"}}
)
def search_qa(
    solution_str: str, ground_truth: object, *, metric: Literal["exact", "f1"] = "exact", needs_tag: bool = True
) -> dict[str, float | str | None]:
    """1 where the content of the last `<answer>` equals a ground truth, else 0; with `metric=f1` the token F1.

    Both are normalised as in SQuAD: lower case, no punctuation (but signs and decimal points of numbers stay), no
    articles, single spaces. The best of a list of ground truths counts; a dict with the list under `target` is
    Search-R1's form. Without `needs_tag`, a response without the tag is its own answer. The parts `exact` and `f1` are
    always reported; the accuracy is `exact`. `pred` is the answer.
    Raises: ValueError where the ground truth has no text.
    """
    truths = read_truths(ground_truth)
    answer = extract_answer(solution_str, needs_tag=needs_tag)
    normalised = normalise(answer or "")
    exact = float(answer is not None and any(normalise(str(truth)) == normalised for truth in truths))
    f1 = max(token_f1(normalised, normalise(str(truth))) for truth in truths) if answer is not None else 0.0
    return {"reward": exact if metric == "exact" else f1, "accuracy": exact, "exact": exact, "f1": f1, "pred": answer}


def read_truths(ground_truth: object, *_: object) -> list[object]:
    """The texts of a ground truth.  Raises: ValueError."""
    truths = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    truths = [truths] if isinstance(truths, str | int | float) else entries(truths) or []
    if not truths or None in truths:
        raise truth_error(ground_truth, "a text or a list of texts", "write at least one")
    return truths


def extract_answer(text: str, *, needs_tag: bool) -> str | None:
    """The content of the last closed `<answer>` after the last `</think>`; None, or the whole text, without one."""
    text = after_thought(text)
    before, closing, _ = text.rpartition("</answer>")
    _, opening, content = before.rpartition("<answer>")
    if closing and opening:
        return content.strip()
    return None if needs_tag else text.strip()


def normalise(text: str) -> str:
    """SQuAD's normalisation (Rajpurkar et al. 2016): lower case, no punctuation, no articles, single spaces. The
    minus sign and the decimal point of a number stay."""
    return " ".join(_ARTICLES.sub(" ", _PUNCTUATION.sub("", text.lower())).split())


def token_f1(answer: str, truth: str) -> float:
    """F1 of the words that two normalised texts share; 1 where both are empty."""
    found, expected = answer.split(), truth.split()
    if not found or not expected:
        return float(found == expected)
    common = sum((Counter(found) & Counter(expected)).values())
    return 2 * common / (len(found) + len(expected))
