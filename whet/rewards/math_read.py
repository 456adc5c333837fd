# SPDX-License-Identifier: Apache-2.0
r"""Reads an answer for `math`: its mathematics apart from a unit, a condition, and words before it.

`\text{The answer is } 60\text{ km/h}` is 60, of km/h; `x = 2\pi k \quad (k \in \mathbb{Z})` is `x = 2\pi k`."""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from whet.rewards.math_tex import WORDS, clean
from whet.rewards.math_units import UNITS, Amount, split_unit
from whet.rewards.result import number_text

MAX_CHARS = 500  # of an expression; a longer one is no answer
NORMALISATIONS = tuple((re.compile(pattern), written) for pattern, written in WORDS["normalisations"].items())
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|-?\.\d+")
_LAYOUT = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|\\displaystyle|\\!|\\quad|(?<!\w)(?<!\d,)\s|\s(?!\w)|(?<=\d,)\s(?!\d{3}(?!\d))"
)
_MONEY = re.compile(r"\\\$|[€£¥₹¢]|^(?:USD|EUR|GBP|CNY|INR|Rs)\b")
_WORDS_BEFORE = re.compile(r"\\text\{([^{}\d]+)\}\s*([:=]?)|([^\\{}$\d=]*?(?:\b(?:is|are|equals)\b|[是为]))\s*:?")
_NOT_BEFORE = re.compile(
    r"(?i)\b(?:not?|never|neither|more|less|least|most|than|half|twice|double|or|and)\b|n['\u2019]t\b|不"
)
_RELATION = r"(?:\\in|<=?|>=?|\\leq?(?:slant)?|\\geq?(?:slant)?|\\neq?|\\lt|\\gt)(?![a-zA-Z])"
_FOR = r"\\text\{,?\s?(?:where|for|with|if|when|and|such that)?\s?(?:any|all|every|some|each)?\s?"
_INTEGERS = re.compile(
    rf"{_FOR}(?:an?\s)?integers?\s?([a-zA-Z]?)\}}\s?([a-zA-Z]?)"
    rf"|{_FOR}\}}\s?([a-zA-Z])\s?\\text\{{(?:is|are)(?: an?)? integers?\}}"
)
_CONDITION = re.compile(
    rf"((?:[\s,;(]|\\quad|{_FOR}\}})+)(?P<name>[a-zA-Z]?)\s?(?P<holds>{_RELATION}\s?[^=<>,;]+?)\s?\)?"
)
WHOLE = r"\in\mathbb{Z}"


class Reading(NamedTuple):
    """An answer as it is compared. `text`: its mathematics without unit and condition; `condition`: a name and what
    holds for it; `is_remark`: it ends with a text that is no unit."""

    text: str
    unit: frozenset[tuple[str, int]]
    is_sure: bool  # False where the unit may be variables: `5m`
    condition: tuple[str, str] | None
    is_remark: bool


@lru_cache(maxsize=1024)
def read(answer: str) -> Reading:
    """Reads an answer, in TeX or plain text."""
    if len(answer) > MAX_CHARS:
        return Reading(normalise(answer), frozenset(), True, None, False)
    text, condition = _split_condition(normalise(answer))
    text = re.sub(r"^[a-zA-Z]\s?\\in\s?(?=[\\(\[])|^(?:USD|EUR|GBP|CNY|INR|Rs)\b\s?", "", text)
    text = re.sub(r"^\((\w+)\)(?=_\{)", r"\1", text)
    amount = split_unit(text)
    is_remark, amount = amount is None, amount or Amount(text)
    text, unit, scale, is_sure = amount
    if scale and (value := number(text)) is not None:
        text = number_text(value.scaleb(scale))
    elif scale:
        text = f"{text} \\times 10^{{{scale}}}"
    money = _MONEY.search(clean(answer)) or re.search(r"\$(?=[^$]*$)", answer * (answer.count("$") % 2))
    if money and all(size < 0 for _, size in unit):
        unit, is_sure = unit | {(UNITS[money[0].strip("\\").lower()], 1)}, True
    return Reading(text, unit, is_sure, condition, is_remark)


@lru_cache(maxsize=1024)
def normalise(text: str) -> str:
    """Returns `text` on one line as `math_tex.clean` writes it, with `NORMALISATIONS` applied."""
    if len(text) > MAX_CHARS:
        return " ".join(text.split())
    text = _without_words_before(clean(text))
    for pattern, replacement in NORMALISATIONS:
        text = pattern.sub(replacement, text)
    return text.strip()


def key_of(text: str) -> str:
    """A number as its value, anything else as its text without layout."""
    if _NUMBER.fullmatch(text):
        return number_text(Decimal(text.replace(",", "")))
    return _LAYOUT.sub("", text)


def number(key: str) -> Decimal | None:
    """The number that the key of an answer is, where its length is quick to read; None for anything else."""
    return Decimal(key.replace(",", "")) if len(key) < 100 and _NUMBER.fullmatch(key) else None


def renamed(one: Reading, other: Reading) -> str | None:
    """The text of `one` with the name for which its condition holds as in `other`; None where conditions differ. That a
    name is a whole number goes without saying."""
    if one.condition is None or other.condition is None:
        said = one.condition or other.condition
        return one.text if said is None or said[1] == WHOLE else None
    (name, holds), (wanted, needed) = one.condition, other.condition
    if holds != needed or name == wanted or not (name and wanted):
        return one.text if holds == needed else None
    is_free = wanted not in re.sub(r"\\[a-zA-Z]+", "", one.text)
    return re.sub(rf"(?<![a-zA-Z\\]){name}(?![a-zA-Z])", wanted, one.text) if is_free else None


def _split_condition(text: str) -> tuple[str, tuple[str, str] | None]:
    """An answer without the condition behind it, and the condition."""
    text = _INTEGERS.sub(lambda each: rf", {each[1] or each[2] or each[3] or ''}{WHOLE}", text)
    for separator in re.finditer(r"[\s,;(]+|\\quad|\\text", text):
        head, found = text[: separator.start()], _CONDITION.fullmatch(text, separator.start())
        is_whole = head.strip() and head.count("(") == head.count(")") and not re.search(rf"{_RELATION}|\\text", head)
        if found and is_whole and re.search(r"[,;(]|\\quad|\\text", found[1]):
            holds = re.sub(r"\s|slant|(?<=[gln]e)q", "", found["holds"])
            return head, (found["name"], WHOLE if holds == r"\inZ" else holds)
    return text.replace(r"\quad", " "), None


def _without_words_before(text: str) -> str:
    """`text` without "The answer is" and the like before it, and out of the \\text{} that holds all of it."""
    text = re.sub(r"^(?:\\(?:approx|Rightarrow|implies|to)(?![a-zA-Z])\s?)+", "", text)
    if whole := re.fullmatch(r"\\text\{((?:[^{}]|\^\{[^{}]*\})*)\}(\^\{\d\})?", text):
        text = whole[1] + (whole[2] or "")
    found = _WORDS_BEFORE.match(text)
    if not found or found.end() == len(text):
        return text
    words, rest = (found[1] or found[3]).strip(), text[found.end() :].strip()
    if words in ("negative", "minus"):
        return f"-{rest}"
    is_said = found[2] or found[3] or re.search(r"(?:\b(?:is|are|equals)|[:=是为])$", words)
    return rest if is_said and not _NOT_BEFORE.search(words) else text
