# SPDX-License-Identifier: Apache-2.0
r"""Reads an answer for `math`: its mathematics apart from a unit, a condition, and words before it.

`\text{The answer is } 60\text{ km/h}` is 60, of km/h, as is `60 kilometers per hour`;
`x = 2\pi k \quad (k \in \mathbb{Z})` is `x = 2\pi k`."""

from __future__ import annotations

import re
from collections import Counter
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple

from whet.rewards.math_tex import WORDS, clean
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


# -- units: a set of base units with their powers. Units of different size are different: nothing is converted.

_TABLE = WORDS["units"]
_SPELT, _POWERS, _SCALES = _TABLE["spelt"], _TABLE["powers"], _TABLE["scales"]
_LONE = "msghLlNJWVKA"  # letters that are units where they stand alone behind a number
# What makes a text a remark or another answer: "42 \text{ is wrong}".
_REMARK = re.compile(
    r"(?i)[,;:?!不或]|(?<![a-z])\(|(?<![\^{-])\d|\b(?:not?|nor|or|and|but|is|was|wrong|maybe|dozens?|factorial|times|plus|minus"
    r"|mod)\b"
)
_START = re.compile(r"/?\s?\\text\{|\\frac\{\\text\{|(?<![\\a-zA-Z])[^\W\d_]|\^\{\\circ\}|[€£¥₹¢]|\\Omega")
_TEXT = r"\\text\{(?:[^{}]|\^\{(?:-?\d|\\circ)\})*\}"
_TAIL = re.compile(
    rf"(?:{_TEXT}|\\frac\{{{_TEXT}\}}\{{{_TEXT}(?:\^\{{\d\}})?\}}|[^\W\d_]\.?|\^\{{(?:-?\d|\\circ)\}}|\\(?:cdot|times|Omega)"
    r"(?![a-zA-Z])|\\[,;:! ]|[\s/·*~()€£¥₹¢-])+"
)
_AMOUNT = re.compile(r"(?:[-+\d.,:\s{}()/!^]|\\(?:frac|sqrt|pi|cdot|times|pm)(?![a-zA-Z])|\\[,;:! ])*")
_AFTER = re.compile(r"[^\W\d_]+|[°€£¥₹¢/²³]|\^\{?-?\d\}?|\^\{?\\circ\}?")
_WORD = re.compile(r"[^\W\d_]+|[°€£¥₹¢$/]|(?<=\^)-?\d")


def _table() -> dict[str, str]:
    scaled = [names.split() for names in _TABLE["scaled"].split(", ")]
    found = {name: names[0] for names in (*scaled, *map(str.split, _TABLE["others"].split(", "))) for name in names}
    for short, long, *more in map(str.split, _TABLE["prefixes"].split(", ")):
        found |= {long + name: short + symbol for symbol, *names in scaled for name in names}
        found = {start + symbol: short + symbol for symbol, *_ in scaled for start in (short, *more)} | found
    return found


UNITS = _table()


class Amount(NamedTuple):
    """An answer without its unit: base units with powers, none for words such as "apples". `scale` is the power of ten
    of "million", `is_sure` False for letters that may be variables: `5m`."""

    text: str
    unit: frozenset[tuple[str, int]] = frozenset()
    scale: int = 0
    is_sure: bool = True


def split_unit(text: str) -> Amount | None:
    """An answer, as `math_tex.clean` writes it, without the unit behind it; None where there is a remark instead."""
    for start in [each.start() for each in _START.finditer(text)]:
        head, tail = text[:start].rstrip(" ~\\,;-"), text[start:]
        is_whole = head.count("{") == head.count("}") and head.strip("-+ ") and r"\text" not in head
        if not is_whole or not _TAIL.fullmatch(tail) or re.match(r"percent|squared|cubed", tail):
            continue
        is_text = tail.lstrip("/ ").startswith((r"\text", r"\frac"))
        if is_text and _REMARK.search(re.sub(r"\\text\{|\}", " ", tail)):
            return None
        tail = re.sub(r"\^\{\\circ\}\s?", "°", tail).replace(r"\Omega", "Ω")
        tail = re.sub(r"\\frac\{|\\text\{|\\cdot|\\times|\\.", " ", tail.replace("}{", " / "))
        words = _WORD.findall(re.sub(r"[{}()]", "", tail))
        if is_text or (_AMOUNT.fullmatch(head) and all(_is_unit(each, words, text[start - 1]) for each in words)):
            is_sure = is_text or any(len(each) > 1 or not each.isascii() for each in words if each not in "/0123-1-2-3")
            return Amount(head, *_read(words), is_sure)
    return Amount(text)


def unit_after(text: str) -> str:
    """The unit in words with which a text begins, behind a number: " square feet" of " square feet, so"."""
    text = re.sub(r"\\(?:text|mbox|math)[a-z]*\s?\{([^{}]*)\}", r" \1", text[:200])
    end = start = re.match(r"(?:[ ~$*}]|\\[,;:! ])*", text).end()  # type: ignore[union-attr]
    for found in _AFTER.finditer(text, start):
        word, is_preposition = found[0], found[0] == "in" and re.match(r"\s*[a-zA-Z]", text[found.end() :])
        is_unit = word in {"per", *_POWERS} or word[0] in "/^°²³" or (_find(word) is not None and not is_preposition)
        if text[end : found.start()].strip(" -") or not is_unit:
            break
        end = found.end()
    return f" {text[start:end]}" if end > start else ""


def _is_unit(word: str, words: list[str], before: str) -> bool:
    """Tells a word of those behind a number from variables: `5 km`, `5 apples`, but not `5ab`, `5abc`, `5x`."""
    if len(word) == 1 or not word.isascii() or not word.isalpha():
        return not (word.isascii() and word.isalpha()) or word in _LONE or (word in "CF" and "°" in words)
    is_text = len(word) > 2 and before == " " and not _REMARK.search(word)
    return is_text or word in {*_POWERS, *_SCALES} or _find(word) is not None


def _find(word: str) -> str | None:
    """The unit of a word, in the singular or plural."""
    tries = [word, *(word[:-cut] for cut in (1, 2) if word.endswith("s") and len(word) > cut + 1)]
    return next((UNITS[each] for each in (*tries, *map(str.lower, tries)) if each in UNITS), None)


def _read(words: list[str]) -> tuple[frozenset[tuple[str, int]], int]:
    """The unit of words, and the power of ten of a number word among them."""
    found, sign, power, last, scale = Counter[str](), 1, 1, list[tuple[str, int]](), 0
    for place, word in enumerate(words):
        if word[:2] in ("平方", "立方"):
            power, word = (2 if word[0] == "平" else 3), word[2:]
        unit = _find(word) if word != "in" or place + 1 == len(words) or words[place + 1] in "/23-1-2" else None
        if word in "/" or word == "per":
            sign = -1
        elif word.rstrip("s") in _SCALES:
            scale += _SCALES[word.rstrip("s")]
        elif re.fullmatch(r"-?\d", word) or word in ("squared", "cubed"):
            for name, size in last:
                found[name] += size * (_POWERS.get(word) or int(word)) - size
        elif word in _POWERS:
            power = _POWERS[word]
        elif unit is not None:
            if word in ("C", "F", "celsius", "Celsius", "fahrenheit", "Fahrenheit") and found["°"]:
                found, unit = Counter(), "°" + word[0].upper()
            last = [(name, sign * power * size) for name, size in _SPELT.get(unit, {unit: 1}).items()]
            found.update(dict(last)) if sign > 0 else found.subtract({name: -size for name, size in last})
            sign = power = 1
        elif word not in ("a", "an", "of", "the", "each"):
            break  # "5 miles away", and what no unit is: "5 apples"
    return frozenset((name, size) for name, size in found.items() if size), scale
