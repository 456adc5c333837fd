# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: the answer is a letter."""

from __future__ import annotations

import re
from typing import Literal

from whet.options import Count, Share
from whet.registry import register_reward
from whet.rewards.result import after_thought, truth_error
from whet.rewards.short_answers import extract_answer

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


@register_reward("multiple_choice", rows_checked_by="whet.rewards.choice:read_truth")
def compute_score(solution_str: str, ground_truth: str, *, lone: bool = False) -> dict[str, float | str | None]:
    """1 where the letter of the answer is that of the ground truth, else 0.

    The letter is searched in the text after the last `</think>`: in the last `\\boxed{}`, else in the last `<answer>`,
    else it is the whole response, else it stands after the last "answer is", "answer:" or "correct option is"
    (choice, letter), else, with `lone`, it is the last capital letter on its own. "B or C" is no answer. The ground
    truth is `B`, `(B)` or `B. text`. `pred` is the letter.
    Raises: ValueError for a ground truth without a letter.
    """
    letter, _ = extract_letter(solution_str, lone=lone)
    return {"reward": float(letter == read_truth(ground_truth)), "pred": letter}


@register_reward("crossthinkqa", rows_checked_by="whet.rewards.choice:read_truth")
def crossthinkqa(
    solution_str: str,
    ground_truth: str,
    *,
    table: Literal["loose", "soft", "strict"] = "loose",
    longest: Count | None = None,
    length_weight: Share = 0.5,
) -> dict[str, float | str | None]:
    """A number by whether the letter is right and whether it is in `\\boxed{}` (Nemotron-CrossThink, arXiv:2504.13941).

    For right and boxed, right, wrong and boxed, wrong: loose 1, 1, -1, -1; soft 1, 0.5, -0.5, -1; strict 1, -1, -1, -1.
    With `longest`, a positive reward is multiplied by 1 - length_weight * min(1, words / longest). `multiple_choice`
    has the rules for letters. The part `boxed` is 1 where the letter is in a box.
    """
    letter, boxed = extract_letter(solution_str)
    right = letter == read_truth(ground_truth)
    reward = TABLES[table][(0 if right else 2) + (not boxed)]
    if longest is not None and reward > 0:
        reward *= 1 - length_weight * min(1.0, len(solution_str.split()) / longest)
    return {"reward": reward, "accuracy": float(right), "boxed": float(boxed), "pred": letter}


def extract_letter(text: str, *, lone: bool = False) -> tuple[str | None, bool]:
    """The capital letter that a response chooses, None where it chooses none; and whether it is in a box."""
    text = after_thought(text)
    tagged = extract_answer(text, needs_tag=True) or ""
    written = [_WRITTEN.fullmatch(content) for content in (*_BOX.findall(text)[-1:], tagged)]
    if found := written[0] or written[-1] or _ALONE.fullmatch(text):
        return found[1].upper(), len(written) > 1 and found is written[0]
    for pattern in (_STATED, _LONE) if lone else (_STATED,):
        if stated := list(pattern.finditer(text)):
            return (stated[-1][1] or stated[-1][2]).upper(), False
    return None, False


def read_truth(ground_truth: str, *_: object) -> str:
    """The letter of a ground truth.  Raises: ValueError."""
    found = _WRITTEN.fullmatch(str(ground_truth))
    if found is None:
        raise truth_error(ground_truth, "B, (B) or `B. text`", "write the letter")
    return found[1].upper()
