# SPDX-License-Identifier: Apache-2.0
r"""Units behind an answer, in words or symbols: `60\text{ km/h}` and `60 kilometers per hour` are 60 of one unit.

A unit is a set of base units with their powers. Units of different size are different: nothing is converted."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from whet.rewards.math_tex import WORDS

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
_NUMBER = re.compile(r"(?:[-+\d.,:\s{}()/!^]|\\(?:frac|sqrt|pi|cdot|times|pm)(?![a-zA-Z])|\\[,;:! ])*")
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
        if is_text or (_NUMBER.fullmatch(head) and all(_is_unit(each, words, text[start - 1]) for each in words)):
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
