# SPDX-License-Identifier: Apache-2.0
"""Comparison of parsed answers by math-verify, with numbers compared exactly; and of notations that parsing loses.

math-verify rounds numbers to six places, so tiny ones are all equal to it, and it reads neither the base of a number
nor the difference of a set and a tuple. Its grader is loaded a second time here: others get it as it comes."""

from __future__ import annotations

import importlib.util
import re
from decimal import Context, Decimal
from typing import Any, TypeAlias

import sympy
from sympy.core.function import AppliedUndef

Expression: TypeAlias = sympy.Basic | sympy.MatrixBase
_spec = importlib.util.find_spec("math_verify.grader")
assert _spec is not None and _spec.loader is not None
_grader: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_grader)
_grader.TIMEOUT_WARNING_SHOWN = True  # without its deadline, which needs the main thread, it warns on first use

# Values of symbols, at random: three times positive, then of both signs; the first six are small, for towers of powers.
POINTS = [
    [
        sympy.Float((7 * row + 13 * place + 3) * 0.6180339887 % (1.6 if row < 6 else 12) + 0.1, 40)
        * (-1 if 2 < row != 6 and (row + place) % 2 else 1)
        for place in range(9)
    ]
    for row in range(10)
]
MIN_DIGITS, MAX_DIGITS = 6, 12  # of a decimal that stands for a number without a finite decimal
_BASE = re.compile(r"(?<![\w\\])(\d[\dA-Z]*)_\{?(\d+)\}?")
_SET, _TUPLE = re.compile(r"\\\{.*\\\}"), re.compile(r"\([^()]*,[^()]*\)")
_CLOCK = re.compile(r"0?((?:1?\d|2[0-4]):[0-5]\d)(?!\d)")
_LESS, _GREATER = r"<=?|≤|\\leq?(?![a-z])|\\leqslant|\\lt(?![a-z])", r">=?|≥|\\geq?(?![a-z])|\\geqslant|\\gt(?![a-z])"
_ORDER = re.compile(rf"\s?({_LESS}|{_GREATER})\s?")
_STRICT = ("<", ">", "\\lt", "\\gt")
_OR = re.compile(r"\s?,?\s?(?:\\(?:text|mbox|mathrm)\s?\{\s?or\s?\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\lor|\\vee)\s?")


def verify(truth: Expression, answer: Expression) -> bool:
    """Returns whether math-verify finds two parsed expressions equal, with `numbers_equal` and `identical` in the place
    of its own comparisons. An `i` is the imaginary unit, and equal names are one symbol, in both."""
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
    """Returns whether two expressions have the same value at every one of `POINTS` where both are real (any value where
    an imaginary unit is in them); where too few points say so, whether their difference simplifies to 0."""
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
    """Returns whether two expressions or matrices are equal without simplification. Constants are equal where 100
    digits show no difference; a decimal also equals a number without a finite decimal that `_stands_for` allows."""
    if isinstance(one, sympy.MatrixBase | sympy.MatrixExpr) and isinstance(other, sympy.MatrixBase | sympy.MatrixExpr):
        one, other = one.doit(), other.doit()
        return one.shape == other.shape and all(map(numbers_equal, one.flat(), other.flat()))
    kinds = [
        next((kind for kind in (sympy.Integer, sympy.Float, sympy.Number) if _is(each, kind)), None)
        for each in (one, other)
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
        # Digits of a difference that is 0, but not evidently, cannot be computed: it has a precision of one bit.
        if gap == 0 or (gap.is_number and gap.is_finite and all(each._prec == 1 for each in gap.atoms(sympy.Float))):
            return True
        if kinds[0] == kinds[1] or sympy.Float not in kinds:
            return False
        return _stands_for(*(exact if kinds[0] is sympy.Float else exact[::-1]))
    except (TypeError, AttributeError, ValueError, ArithmeticError):  # no numbers
        return False


def solutions(*equation: Expression) -> Any:
    """The solutions of an equation for its symbols. Without one, as of `AB = BA`, whose letters commute for the parser,
    it is equal to no other by its solutions.  Raises: ValueError then, which the grader reads so."""
    found = sympy.solve(*equation)
    if not found:
        raise ValueError(f"{equation[0]} has no solutions to compare")
    return found


_simplified = _grader.sympy_symbolic_eq
_grader.sympy_numeric_eq, _grader.sympy_symbolic_eq, _grader.solve = numbers_equal, identical, solutions


def _is(expression: Expression, kind: type) -> bool:
    return bool(_grader.is_atomic_or_pct_atomic(expression, kind))


def _exact(expression: Expression) -> Expression:
    """The expression with fractions for its decimals."""
    return expression.xreplace({each: sympy.Rational(str(each)) for each in expression.atoms(sympy.Float)})


def _stands_for(decimal: Expression, value: Expression) -> bool:
    """Tells whether `decimal` is `value`, rounded or cut off at 6 to 12 digits and 6 places or more, and `value` has no
    finite decimal, as 1/3 and pi."""
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
    """Tells whether two answers, as keys of a vote, differ in what parsing loses: the bases of numbers (`101_2`),
    braces for parentheses, primes, dots, or a time of the day, which is no quotient."""
    kinds = [(_SET.fullmatch(each) is not None, _TUPLE.fullmatch(each) is not None) for each in (one, other)]
    if any(r"\ldots" in each for each in (one, other)) or one.count("'") != other.count("'"):
        return True
    times = [(found := _CLOCK.match(each)) and found[1] for each in (one, other)]
    is_time = times[0] != times[1] and any(map(_CLOCK.fullmatch, (one, other)))
    return is_time or _BASE.findall(one) != _BASE.findall(other) or {*kinds} == {(True, False), (False, True)}


def as_interval(inequality: str) -> str | None:
    r"""Returns the interval of an inequality or a chain, `(1, 2]` of `1 < x \le 2`, or the union of those joined by
    "or"; None for any other text."""
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
