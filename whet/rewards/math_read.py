# SPDX-License-Identifier: Apache-2.0
r"""Reads an answer for `math`: separates its mathematics from a unit, a condition, and words before it. Also compares
expressions parsed by math-verify, with exact numbers, and compares notations that parsing loses.

`\text{The answer is } 60\text{ km/h}` and `60 kilometers per hour` are read as 60 with the unit km/h, and `x = 2\pi k
\quad (k \in \mathbb{Z})` as `x = 2\pi k`. math-verify rounds numbers to six places, so that all tiny numbers are equal,
and ignores the base of a number and the difference between a set and a tuple. Its grader is loaded a second time here
and changed; other users of math-verify get the unchanged grader."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from decimal import Context, Decimal
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import sympy
from sympy.core.function import AppliedUndef

from whet.rewards.math_tex import WORDS, clean
from whet.rewards.result import number_text

MAX_CHARS = 500  # of an expression; a longer expression is no answer
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
    """An answer, prepared for comparison. `text` is its mathematics without unit and condition. `condition` is a name
    and the condition on it (`k`, `\\in\\mathbb{Z}`). `is_remark`: the answer ends with a text that is no unit."""

    text: str
    unit: frozenset[tuple[str, int]]
    is_sure: bool  # False if the letters of the unit may be variables: `5m`
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
    """Returns `text` on one line as cleaned by `math_tex.clean`, with `NORMALISATIONS` applied."""
    if len(text) > MAX_CHARS:
        return " ".join(text.split())
    text = _without_words_before(clean(text))
    for pattern, replacement in NORMALISATIONS:
        text = pattern.sub(replacement, text)
    return text.strip()


def key_of(text: str) -> str:
    """Returns the key of an answer: for a number its value as text, for any other text the text without its layout."""
    if _NUMBER.fullmatch(text):
        return number_text(Decimal(text.replace(",", "")))
    return _LAYOUT.sub("", text)


def number(key: str) -> Decimal | None:
    """Returns the number in the key of an answer; None for any other text, or if it is too long to read quickly."""
    return Decimal(key.replace(",", "")) if len(key) < 100 and _NUMBER.fullmatch(key) else None


def renamed(one: Reading, other: Reading) -> str | None:
    """Returns the text of `one`, with the variable of its condition renamed to the variable of `other`. None if the
    conditions differ. A missing condition equals the condition that a variable is a whole number."""
    if one.condition is None or other.condition is None:
        said = one.condition or other.condition
        return one.text if said is None or said[1] == WHOLE else None
    (name, holds), (wanted, needed) = one.condition, other.condition
    if holds != needed or name == wanted or not (name and wanted):
        return one.text if holds == needed else None
    is_free = wanted not in re.sub(r"\\[a-zA-Z]+", "", one.text)
    return re.sub(rf"(?<![a-zA-Z\\]){name}(?![a-zA-Z])", wanted, one.text) if is_free else None


def _split_condition(text: str) -> tuple[str, tuple[str, str] | None]:
    """Splits an answer into the text before its condition, and the condition."""
    text = _INTEGERS.sub(lambda each: rf", {each[1] or each[2] or each[3] or ''}{WHOLE}", text)
    for separator in re.finditer(r"[\s,;(]+|\\quad|\\text", text):
        head, found = text[: separator.start()], _CONDITION.fullmatch(text, separator.start())
        is_whole = head.strip() and head.count("(") == head.count(")") and not re.search(rf"{_RELATION}|\\text", head)
        if found and is_whole and re.search(r"[,;(]|\\quad|\\text", found[1]):
            holds = re.sub(r"\s|slant|(?<=[gln]e)q", "", found["holds"])
            return head, (found["name"], WHOLE if holds == r"\inZ" else holds)
    return text.replace(r"\quad", " "), None


def _without_words_before(text: str) -> str:
    """Removes "The answer is" and similar words at the start of a text, and a \\text{} around the whole text."""
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
_LONE = "msghLlNJWVKA"  # letters that are units if they stand alone after a number
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
    """An answer, split into text and unit. The unit has base units with powers; it is empty for words like "apples".
    `scale` is the power of ten of "million"; `is_sure` is False for letters that may be variables: `5m`."""

    text: str
    unit: frozenset[tuple[str, int]] = frozenset()
    scale: int = 0
    is_sure: bool = True


def split_unit(text: str) -> Amount | None:
    """Splits the unit from an answer that `math_tex.clean` returned; None if a remark follows instead of a unit."""
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
    """Returns the unit in words at the start of a text after a number: " square feet" of " square feet, so"."""
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
    """Tells whether a word after a number is part of a unit and not a variable: `5 km`, `5 apples`, but not `5ab`,
    `5abc`, `5x`."""
    if len(word) == 1 or not word.isascii() or not word.isalpha():
        return not (word.isascii() and word.isalpha()) or word in _LONE or (word in "CF" and "°" in words)
    is_text = len(word) > 2 and before == " " and not _REMARK.search(word)
    return is_text or word in {*_POWERS, *_SCALES} or _find(word) is not None


def _find(word: str) -> str | None:
    """Finds the unit that a word names, in singular or plural."""
    tries = [word, *(word[:-cut] for cut in (1, 2) if word.endswith("s") and len(word) > cut + 1)]
    return next((UNITS[each] for each in (*tries, *map(str.lower, tries)) if each in UNITS), None)


def _read(words: list[str]) -> tuple[frozenset[tuple[str, int]], int]:
    """Reads the unit in a list of words, and the power of ten of a number word among them."""
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
            break  # the rest is no unit: "5 miles away", "5 apples"
    return frozenset((name, size) for name, size in found.items() if size), scale


Expression: TypeAlias = sympy.Basic | sympy.MatrixBase
NUMBERS = (sympy.Integer, sympy.Float, sympy.Number)  # the kind of a number is the first that fits
_spec = importlib.util.find_spec("math_verify.grader")
assert _spec is not None and _spec.loader is not None
_grader: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_grader)
_grader.TIMEOUT_WARNING_SHOWN = True  # without its deadline, which works in the main thread only, it warns on first use

# Random values of symbols: three points are positive, the others of both signs; six are small, for towers of powers.
POINTS = [
    [
        sympy.Float((7 * row + 13 * place + 3) * 0.6180339887 % (1.6 if row < 6 else 12) + 0.1, 40)
        * (-1 if 2 < row != 6 and (row + place) % 2 else 1)
        for place in range(9)
    ]
    for row in range(10)
]
MIN_DIGITS, MAX_DIGITS = 6, 12  # of a decimal that approximates a number without a finite decimal
_BASE = re.compile(r"(?<![\w\\])(\d[\dA-Z]*)_\{?(\d+)\}?")
_SET, _TUPLE = re.compile(r"\\\{.*\\\}"), re.compile(r"\([^()]*,[^()]*\)")
_CLOCK = re.compile(r"0?((?:1?\d|2[0-4]):[0-5]\d)(?!\d)")
_LESS, _GREATER = r"<=?|≤|\\leq?(?![a-z])|\\leqslant|\\lt(?![a-z])", r">=?|≥|\\geq?(?![a-z])|\\geqslant|\\gt(?![a-z])"
_ORDER = re.compile(rf"\s?({_LESS}|{_GREATER})\s?")
_STRICT = ("<", ">", "\\lt", "\\gt")
_OR = re.compile(r"\s?,?\s?(?:\\(?:text|mbox|mathrm)\s?\{\s?or\s?\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\lor|\\vee)\s?")


def verify(truth: Expression, answer: Expression) -> bool:
    """Tells whether math-verify finds two parsed expressions equal. `numbers_equal` and `identical` replace its
    comparisons. In both expressions `i` is the imaginary unit, and equal names are the same symbol."""
    return bool(_grader.verify(*_united(truth, answer), timeout_seconds=None))


def _united(*expressions: Expression) -> list[Expression]:
    symbols = {each for expression in expressions for each in expression.free_symbols}
    names = {each.name for each in symbols}
    if len(names) == len(symbols) and "i" not in names:
        return [*expressions]
    one = {
        each: sympy.I if each.name == "i" else sympy.Symbol(each.name, real="i" not in names or None)
        for each in symbols
    }
    return [each.xreplace(one) for each in expressions]


def identical(one: Expression, other: Expression) -> bool:
    """Tells whether two expressions have the same value at all `POINTS` where both are real (or at all `POINTS`, if one
    has the imaginary unit). If these points are too few, tests whether the difference simplifies to 0."""
    is_plain = isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)
    both = sympy.Tuple(one, other) if is_plain else sympy.Tuple()
    symbols = [] if both.has(AppliedUndef) else sorted(both.free_symbols, key=str)
    raised = [each.args[-1] for each in both.atoms(sympy.Pow, sympy.exp, sympy.factorial)]
    if not symbols or any(each.is_number and abs(each) > 1000 for each in raised):
        return bool(_simplified(one, other))
    is_complex, told = one.has(sympy.I) or other.has(sympy.I), 0
    for point in POINTS[:6] if any(each.free_symbols for each in raised) else POINTS:
        at = {each: point[place % len(point)] for place, each in enumerate(symbols)}
        values = [each.xreplace(at).evalf(30) for each in (one, other)]
        if not all(each.is_number and each.is_finite and (is_complex or each.is_real) for each in values):
            continue
        if abs(values[0] - values[1]) > 1e-15 * abs(values[0]) + 1e-33:
            return False
        told += 1
    return told > 2 or bool(_simplified(one, other))


def numbers_equal(one: Expression, other: Expression, *_: object) -> bool:
    """Tells whether two expressions or matrices are equal, without simplification. Constants are equal if 100 digits
    show no difference. A decimal also equals a number without a finite decimal if `_stands_for` allows it."""
    if isinstance(one, sympy.MatrixBase | sympy.MatrixExpr) and isinstance(other, sympy.MatrixBase | sympy.MatrixExpr):
        one, other = one.doit(), other.doit()
        return one.shape == other.shape and all(map(numbers_equal, one.flat(), other.flat()))
    kinds = [
        next((kind for kind in NUMBERS if _grader.is_atomic_or_pct_atomic(each, kind)), None) for each in (one, other)
    ]
    if kinds == [sympy.Integer, sympy.Integer]:
        return bool(_grader.get_pct_val(one, one) == _grader.get_pct_val(other, other))  # 9% is also 9
    try:
        exact = [_exact(each) for each in (one, other)]
        if any(kinds) or all(each.is_rational for each in exact):
            exact = [each.doit() for each in exact]
            if exact[0] == exact[1] or (all(each.is_Rational for each in exact) and sympy.Float not in kinds):
                return bool(exact[0] == exact[1])
        gap = (exact[0] - exact[1]).evalf(15)
        # If a difference is 0 but not simplified to 0, no digit of it can be computed: its precision is one bit.
        if gap == 0 or (gap.is_number and gap.is_finite and all(each._prec == 1 for each in gap.atoms(sympy.Float))):
            return True
        if kinds[0] == kinds[1] or sympy.Float not in kinds:
            return False
        return _stands_for(*(exact if kinds[0] is sympy.Float else exact[::-1]))
    except (TypeError, AttributeError, ValueError, ArithmeticError):  # no numbers
        return False


def solutions(*equation: Expression) -> Any:
    """Solves an equation for its symbols.  Raises: ValueError without a solution; the grader then finds the equation
    not equal. (`AB = BA` has none, because letters commute for the parser. Such equations must not equal each other.)
    """
    found = sympy.solve(*equation)
    if not found:
        raise ValueError(f"{equation[0]} has no solutions to compare")
    return found


_simplified = _grader.sympy_symbolic_eq
_grader.sympy_numeric_eq, _grader.sympy_symbolic_eq, _grader.solve = numbers_equal, identical, solutions


def _exact(expression: Expression) -> Expression:
    """Replaces the decimals of an expression by fractions."""
    return expression.xreplace({each: sympy.Rational(str(each)) for each in expression.atoms(sympy.Float)})


def _stands_for(decimal: Expression, value: Expression) -> bool:
    """Tells whether `decimal` is `value`, rounded or truncated to 6 to 12 digits and at least 6 decimal places. False
    for a `value` with a finite decimal: `value` must be like 1/3 and pi."""
    if value.is_Rational and not re.sub("[25]", "", "".join(map(str, sympy.factorint(value.q)))):
        return False
    number = Context(prec=MAX_DIGITS).divide(Decimal(decimal.p), Decimal(decimal.q)).normalize()
    digits, places = number.as_tuple().digits, -int(number.as_tuple().exponent)
    unit, value = sympy.Rational(1, 10**places) if places > 0 else sympy.Integer(1), value.evalf(30)
    decimal = sympy.Rational(str(number))
    gap, is_less = abs(decimal - value), abs(decimal) < abs(value)
    return bool(
        min(len(digits), places) >= MIN_DIGITS
        and (gap <= unit / 2 or (is_less and gap < unit))
        and decimal.round(6) == value.round(6)
    )


def differs(one: str, other: str) -> bool:
    """Tells whether two answers (keys from `key_of`) differ in notations that parsing loses: the base of a number
    (`101_2`), braces or parentheses, primes, dots, or a time of day (`3:30`), which the parser reads as a quotient."""
    kinds = [(_SET.fullmatch(each) is not None, _TUPLE.fullmatch(each) is not None) for each in (one, other)]
    if any(r"\ldots" in each for each in (one, other)) or one.count("'") != other.count("'"):
        return True
    times = [(found := _CLOCK.match(each)) and found[1] for each in (one, other)]
    is_time = times[0] != times[1] and any(map(_CLOCK.fullmatch, (one, other)))
    return is_time or _BASE.findall(one) != _BASE.findall(other) or {*kinds} == {(True, False), (False, True)}


def as_interval(inequality: str) -> str | None:
    r"""Returns the interval of an inequality: `(1, 2]` for `1 < x \le 2`. For inequalities joined by "or" returns the
    union of their intervals; None for any other text."""
    found = [_interval(part) for part in _OR.split(inequality)]
    return " \\cup ".join(each for each in found if each) if all(found) else None


def _interval(text: str) -> str | None:
    ends = _ORDER.split(text)
    signs, ends = ends[1::2], ends[::2]
    is_falling = [re.fullmatch(_GREATER, each) is not None for each in signs]
    if len({*is_falling}) != 1 or any("=" in each for each in ends):
        return None
    if is_falling[0]:
        signs, ends = signs[::-1], ends[::-1]
    if len(ends) == 2:
        first = re.fullmatch("[a-zA-Z]", ends[0]) is not None
        signs = ["<", *signs] if first else [*signs, "<"]
        ends = ["-\\infty", *ends] if first else [*ends, "\\infty"]
    if len(ends) != 3 or not re.fullmatch("[a-zA-Z]", ends[1]):
        return None
    left, right = ("[("[signs[0] in _STRICT]), ("])"[signs[1] in _STRICT])
    return f"{left}{ends[0]}, {ends[2]}{right}"
