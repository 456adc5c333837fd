# SPDX-License-Identifier: Apache-2.0
"""Competition mathematics: the answer is an expression, right if it equals the truth, however it is written."""

from __future__ import annotations

import re
from decimal import Decimal

import math_verify.grader
import math_verify.parser
from math_verify import parse, verify

from whet.registry import register_reward
from whet.rewards.result import number_text

# math-verify's own deadline is SIGALRM, which works in the main thread only; the reward pool has a better one. Without
# its own, math-verify warns on first use, unless these say that it did.
math_verify.parser.TIMEOUT_WARNING_SHOWN = True
math_verify.grader.TIMEOUT_WARNING_SHOWN = True

_BOXED = re.compile(r"\\f?boxed\s*\{")
_ANSWER_IS = re.compile(r"answer\s+is\s*:?\s*(.+?)\s*(?:\.\s|\.?$)", re.IGNORECASE | re.MULTILINE)
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\.\d+")
_WRAPPED = re.compile(r"(?:\$\$?|\*\*|\\\(|\\\[)\s*(.*?)\s*(?<!\\)(?:\$\$?|\*\*|\\\)|\\\])")
_LAYOUT = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\[,;:! ]|\s")
_THOUGHT_END = "</think>"


@register_reward("math", aliases=("math_verify",))
def compute_score(solution_str: str, ground_truth: str | int | float) -> dict[str, float | str | None]:
    """1 where the answer equals the ground truth (as text, else to math-verify: as numbers, then as symbols), else 0.

    The answer is the last closed `\\boxed{}`, else what follows the last "answer is", else the last number, in the text
    behind the last `</think>`. What math-verify cannot parse is compared as text. A `ground_truth` may be boxed too.
    `pred` is the answer's `vote`.
    """
    answer = extract_answer(solution_str)
    truth = str(ground_truth)
    boxed_truth = _last_boxed(truth)
    if answer is None:
        return {"reward": 0.0, "pred": None}
    correct = is_equal(answer, truth if boxed_truth is None else boxed_truth)
    return {"reward": float(correct), "pred": vote(answer)}


def extract_answer(text: str) -> str | None:
    """The answer as written, without its box; None where the text gives none."""
    text = text.rpartition(_THOUGHT_END)[2]
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    for pattern in (_ANSWER_IS, _NUMBER):
        if matches := pattern.findall(text):
            return str(matches[-1])
    return None


def is_equal(answer: str, truth: str) -> bool:
    """Whether two expressions, as LaTeX or plain text, are one. Without a deadline: hostile input may take for ever."""
    answer, truth = _bare(answer), _bare(truth)
    if answer == truth:
        return answer != ""
    parsed_truth, parsed_answer = (parse(f"${each}$", parsing_timeout=None) for each in (truth, answer))
    return bool(verify(parsed_truth, parsed_answer, timeout_seconds=None))


def vote(answer: str) -> str:
    """What a majority counts as one answer: a number by its value, all else by its text without spaces and sizes.

    Parsing could unite more of them, but a vote must not hang on how a parser fails."""
    text = _bare(answer)
    if _NUMBER.fullmatch(text):
        return number_text(Decimal(text.replace(",", "")))
    return _LAYOUT.sub("", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def _bare(text: str) -> str:
    """On one line, without the marks around it: what math-verify takes between two `$`."""
    text = " ".join(text.split())
    while match := _WRAPPED.fullmatch(text):
        text = match[1]
    return text


def _last_boxed(text: str) -> str | None:
    """What the last box that is closed holds."""
    for opening in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for position in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[opening.end() : position].strip()
    return None
