# SPDX-License-Identifier: Apache-2.0
"""Scores short answers: exact match and token F1 after SQuAD's normalisation, and letters of multiple choice."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Literal

from whet.options import Count, Share
from whet.registry import register_reward
from whet.rewards.exact_match import ARTICLES, exact_match as exact_match
from whet.rewards.result import after_thought, entries, truth_error

# Punctuation, but not the minus sign of -5 nor the point of 4.2: SQuAD's own rule makes 5 and 42 of them.
_PUNCTUATION = re.compile(rf"(?!(?<!\w)-?\.?\d|(?<=\d)\.\d)[{re.escape(string.punctuation)}]")


@register_reward(
    "search_qa",
    rows_checked_by="whet.plugins.scores.short_answers:read_truths",
    aliases={"search_qa_f1": {"metric": "f1"}},
)
def search_qa(
    solution_str: str, ground_truth: object, *, metric: Literal["exact", "f1"] = "exact", needs_tag: bool = True
) -> dict[str, float | str | None]:
    """1 if the content of the last `<answer>` equals a ground truth, else 0; with `metric=f1` the token F1.

    Answer and ground truth are normalised as in SQuAD: lower case, no punctuation (but signs and decimal points of
    numbers stay), no articles, single spaces. Of a list of ground truths the best match counts; a dict with the list
    under `target` is Search-R1's form. Without `needs_tag`, a response without the tag is its own answer. The parts
    `exact` and `f1` are always reported; the accuracy is `exact`. `pred` is the answer.  Raises: ValueError for a
    ground truth without text."""
    truths = read_truths(ground_truth)
    answer = extract_answer(solution_str, needs_tag=needs_tag)
    normalised = normalise(answer or "")
    exact = float(answer is not None and any(normalise(str(truth)) == normalised for truth in truths))
    f1 = max(token_f1(normalised, normalise(str(truth))) for truth in truths) if answer is not None else 0.0
    return {"reward": exact if metric == "exact" else f1, "accuracy": exact, "exact": exact, "f1": f1, "pred": answer}


def read_truths(ground_truth: object, *_: object) -> list[object]:
    """Reads the texts of a ground truth.  Raises: ValueError."""
    truths = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    truths = [truths] if isinstance(truths, str | int | float) else entries(truths) or []
    if not truths or None in truths:
        raise truth_error(ground_truth, "a text or a list of texts", "write at least one")
    return truths


def extract_answer(text: str, *, needs_tag: bool) -> str | None:
    """Returns the last closed `<answer>` after the last `</think>`; without one None if `needs_tag`, else all text."""
    text = after_thought(text)
    before, closing, _ = text.rpartition("</answer>")
    _, opening, content = before.rpartition("<answer>")
    if closing and opening:
        return content.strip()
    return None if needs_tag else text.strip()


def normalise(text: str) -> str:
    """Normalises a text as SQuAD does (Rajpurkar et al. 2016): lower case, no punctuation, no articles, single spaces.
    The minus sign and the decimal point of a number stay."""
    return " ".join(ARTICLES.sub(" ", _PUNCTUATION.sub("", text.lower())).split())


def token_f1(answer: str, truth: str) -> float:
    """Returns the token F1 of two normalised texts; 1 if both are empty."""
    found, expected = answer.split(), truth.split()
    if not found or not expected:
        return float(found == expected)
    common = sum((Counter(found) & Counter(expected)).values())
    return 2 * common / (len(found) + len(expected))


_BOX = re.compile(r"\\f?box(?:ed)?\s*\{((?:[^{}]|\{[^{}]{0,200}\}){0,200})\}")
_WRITTEN = re.compile(
    r"[\s$*_\"'(\[{]*(?:\\(?:text|mathrm|mathbf|textbf)\s*\{\W*)?([A-Za-z])(?:[\W_]*|[).:}]+[\s\\].*)", re.DOTALL
)
# A small letter counts in brackets only: "the answer is a dog". "I think" is no letter, and "B or C" is no answer.
_LETTER = (
    r"(?:\b([A-HJ-Z]|I(?!\s+[a-z]))\b|[(\[]([A-Za-z])[)\]])"
    r"(?!['\u2019.-]\w|[)\]*_]*\s*(?:or|and|,|/|&)\s*[(\[*_]*[A-Z]\b)"
)
_STATED = re.compile(
    r"(?i:\b(?:answer|(?:correct|right|best)\s+(?:option|choice|letter))\b[*_\s]*(?:is|:|=)[\s*_:$\"']*"
    rf"(?:(?:the\s+)?(?:option|choice)\s+)?)[(\[*_]*?{_LETTER}"
)
_ALONE = re.compile(r"[\s$*_\"'(\[]*([A-Za-z])[\s$*_\"')\].:]*")  # all of a response
_LONE = re.compile(rf"(?<![\w'\u2019.-]){_LETTER}")
TABLES = {"loose": (1.0, 1.0, -1.0, -1.0), "soft": (1.0, 0.5, -0.5, -1.0), "strict": (1.0, -1.0, -1.0, -1.0)}


@register_reward("multiple_choice", rows_checked_by="whet.plugins.scores.short_answers:read_letter")
def multiple_choice(solution_str: str, ground_truth: str, *, lone: bool = False) -> dict[str, float | str | None]:
    """1 if the answer has the same letter as the ground truth, else 0.

    The letter is searched in the text after the last `</think>`: in the last `\\boxed{}`, else in the last `<answer>`,
    else it is the whole response, else it stands after the last "answer is", "answer:" or "correct option is"
    (choice, letter), else, with `lone`, it is the last capital letter on its own. "B or C" is no answer. The ground
    truth is `B`, `(B)` or `B. text`. `pred` is the letter.
    Raises: ValueError for a ground truth without a letter.
    """
    letter, _ = extract_letter(solution_str, lone=lone)
    return {"reward": float(letter == read_letter(ground_truth)), "pred": letter}


@register_reward("crossthinkqa", rows_checked_by="whet.plugins.scores.short_answers:read_letter")
def crossthinkqa(
    solution_str: str,
    ground_truth: str,
    *,
    table: Literal["loose", "soft", "strict"] = "loose",
    longest: Count | None = None,
    length_weight: Share = 0.5,
) -> dict[str, float | str | None]:
    """Scores the correctness of the letter, and a `\\boxed{}` around it (Nemotron-CrossThink, arXiv:2504.13941).

    The rewards of right and boxed, right, wrong and boxed, wrong are 1, 1, -1, -1 (`loose`), 1, 0.5, -0.5, -1 (`soft`),
    or 1, -1, -1, -1 (`strict`). `longest` multiplies a positive reward by 1 - length_weight * min(1, words / longest).
    The letter is found as in `multiple_choice`. The part `boxed` is 1 if the letter is in a box."""
    letter, boxed = extract_letter(solution_str)
    right = letter == read_letter(ground_truth)
    reward = TABLES[table][(0 if right else 2) + (not boxed)]
    if longest is not None and reward > 0:
        reward *= 1 - length_weight * min(1.0, len(solution_str.split()) / longest)
    return {"reward": reward, "accuracy": float(right), "boxed": float(boxed), "pred": letter}


def extract_letter(text: str, *, lone: bool = False) -> tuple[str | None, bool]:
    """Returns the capital letter that a response chooses (None without one), and whether the letter is in a box."""
    text = after_thought(text)
    tagged = extract_answer(text, needs_tag=True) or ""
    written = [_WRITTEN.fullmatch(content) for content in (*_BOX.findall(text)[-1:], tagged)]
    if found := written[0] or written[-1] or _ALONE.fullmatch(text):
        return found[1].upper(), len(written) > 1 and found is written[0]
    for pattern in (_STATED, _LONE) if lone else (_STATED,):
        if stated := list(pattern.finditer(text)):
            return (stated[-1][1] or stated[-1][2]).upper(), False
    return None, False


def read_letter(ground_truth: str, *_: object) -> str:
    """Reads the letter of a ground truth.  Raises: ValueError."""
    found = _WRITTEN.fullmatch(str(ground_truth))
    if found is None:
        raise truth_error(ground_truth, "B, (B) or `B. text`", "write the letter")
    return found[1].upper()
