# SPDX-License-Identifier: Apache-2.0
"""Grade-school word problems (Cobbe et al. 2021, arXiv:2110.14168): the answer is one number."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

from whet.errors import ConfigError
from whet.options import Share
from whet.registry import register_reward
from whet.rewards.result import after_thought, is_repeated, number_text, truth_error

# A minus sign directly after a digit, letter or bracket subtracts: "16-3" ends in 3.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}.])[-\u2212])?\$?(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_MARK = "####"
# The last number of 1/2, 10^6, 2**3, x_2, 1e-6, \frac{1}{2} and \sqrt{5} is part of an expression. After `####` there
# must be one number only, not several as in "5 or 6", "3-5" and "5, 6".
_PART_OF = re.compile(r"(?:\w_|\w\s*\^|[\d)}\]](?:\s*/|\*\*|\s\*\*\s)|\}\s*\{|\\sqrt|\d[eE][-+\u2212]?)\s*[({]*\s*$")
_GOES_ON = re.compile(r"\s*\^|[ \t]*(?:[-+*/×÷:,\u2013]|or|and|to|[eE])[ \t]*[-+$({\\]*\s*\d")


@register_reward("gsm8k", rows_checked_by="whet.rewards.gsm8k:read_truth")
def compute_score(
    solution_str: str,
    ground_truth: str | int | float,
    prompt_str: str = "",
    *,
    method: Literal["flexible", "strict"] = "flexible",
    format_score: Share = 0.0,
) -> dict[str, float | str | None]:
    """1 if the answer is the number of the ground truth, `format_score` if it is another number, else 0.

    `strict` reads the number after the last `####`, `flexible` the last number, both in the text after the last
    `</think>`. Commas, `$` and a trailing dot do not matter, and 72.0 equals 72. A number inside a fraction, power or
    root does not count, nor does the first of several numbers after `####`, nor a number in a copy of the prompt.
    `ground_truth` is the number, or a published solution, which ends in `#### n`. `pred` is the number found.
    Raises: ValueError for a ground truth without a number, and for an unknown method."""
    if method not in ("flexible", "strict"):
        raise ConfigError("method", method, "'flexible' or 'strict'")
    truth = read_truth(ground_truth)
    text = after_thought(solution_str)
    found = _number_after_mark(text) if method == "strict" else last_number(text, prompt_str)
    correct = float(found == truth)
    pred = None if found is None else number_text(found)
    return {"reward": correct or (0.0 if found is None else format_score), "accuracy": correct, "pred": pred}


def read_truth(ground_truth: object, *_: object) -> Decimal:
    """Reads the number of a ground truth.  Raises: ValueError."""
    truth = last_number(str(ground_truth).rpartition(_MARK)[2])
    if truth is None:
        raise truth_error(ground_truth, "a number")
    return truth


def _number_after_mark(text: str) -> Decimal | None:
    _, mark, rest = text.rpartition(_MARK)
    match = _NUMBER.match(rest.lstrip()) if mark else None
    return _value(match) if match and not _GOES_ON.match(match.string, match.end()) else None


def last_number(text: str, prompt: str = "") -> Decimal | None:
    """Returns the last number of a text. None if there is no number, or if the last number is part of a fraction, power
    or root, or of a copy of the prompt."""
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    start, end = matches[-1].span()
    is_part = text.startswith("^", end) or bool(_PART_OF.search(text[max(0, start - 80) : start]))
    is_part = is_part or bool(prompt and is_repeated(text, start, prompt))
    return None if is_part else _value(matches[-1])


def _value(match: re.Match[str]) -> Decimal:
    value = Decimal(match["digits"].replace(",", ""))
    return -value if match["sign"] else value
