# SPDX-License-Identifier: Apache-2.0
"""Ways to write an answer, and answers that are nearly right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

INTEGER = re.compile(r"-?\d+")
DECIMAL = re.compile(r"-?\d*\.\d+")
FRACTION = re.compile(r"(-?)\\[dt]?frac(?:\{(-?\d+)\}\{(\d+)\}|\s?(\d)(\d)|\s?(\d)\{(\d+)\})")
DEGREES = re.compile(r"(-?[\d.]+)\s?\^\{?\\circ\}?")
TUPLE = re.compile(r"([(\[])([^()\[\]]+(?:,[^()\[\]]+)+)([)\]])")
MATRIX = re.compile(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", re.DOTALL)
RELATION = re.compile(r"[<>=]|\\(?:[lg]eq?|neq|in|text|mbox|mathbb)\b|(?<!\\)\b[A-Za-z]{3,}")
VALUE = re.compile(r"-?[\d.]+(?:/\d+)?|-?\\[dt]?frac\{\d+\}\{\d+\}|-?\d*\\?(?:sqrt\{\d+\}|pi)")


def value_of(answer: str) -> Fraction | None:
    """The number that an answer is; None for any other."""
    if INTEGER.fullmatch(answer) or DECIMAL.fullmatch(answer):
        return Fraction(Decimal(answer))
    found = FRACTION.fullmatch(answer)
    if found is None:
        return None
    sign, *digits = found.groups()
    above, below = (int(each) for each in digits if each is not None)
    return Fraction(above, below) * (-1 if sign else 1)


def texts(answer: str) -> Iterator[str]:
    """Responses around an answer, of whatever kind."""
    yield rf"So it is \boxed{{{answer}}}."
    yield rf"\boxed{{ {answer} }}"
    yield rf"\fbox{{{answer}}}"
    yield rf"The first guess is \boxed{{0.123}}, and after a check: $$\boxed{{{answer}}}$$"
    yield f"<think>perhaps 0.123</think>The answer is ${answer}$."
    yield f"<answer>{answer}</answer>"
    yield f"**Answer:** {answer}"
    yield f"Final answer: $${answer}$$"
    yield rf"Therefore, the answer is \({answer}\)."
    yield f"Adding up:\n\\[ {answer} \\]"


def forms(answer: str) -> Iterator[str]:
    """Other ways to write an answer, for a box."""
    yield f"${answer}$"
    yield f"{answer}."
    value = value_of(answer)
    if not RELATION.search(answer):
        yield f"x = {answer}"
        if len(answer) > 1 or answer.isdigit():  # of "A = x", A may be the name
            yield f"{answer} = x"
    if value is not None:
        yield from _numbers(answer, value)
    elif found := DEGREES.fullmatch(answer):
        yield from (rf"{found[1]}^{{\circ}}", f"{found[1]}°", rf"{found[1]} \text{{ degrees}}", found[1])
    elif found := TUPLE.fullmatch(answer):
        parts = [part.strip() for part in found[2].split(",")]
        yield f"{found[1]}{','.join(parts)}{found[3]}"
        yield f"{found[1]} {' ,  '.join(parts)} {found[3]}"
        yield rf"\left{found[1]}{', '.join(parts)}\right{found[3]}"
        if r"\infty" in answer and found[1] != "[" and found[3] != "]":
            yield rf"{parts[0]} < x < {parts[1]}"
    elif found := MATRIX.fullmatch(answer):
        yield rf"\begin{{bmatrix}}{found[1]}\end{{bmatrix}}"
        yield answer.replace(" ", "")
        yield answer.replace(r"\\", "\\\\\n")
    elif "," in answer and all(VALUE.fullmatch(part.strip()) for part in answer.split(", ")):
        parts = [part.strip() for part in answer.split(",")]
        yield ", ".join(reversed(parts))
        yield rf"\{{{', '.join(parts)}\}}"
        yield f"{', '.join(parts[:-1])} and {parts[-1]}"
    if r"\frac" in answer:
        yield answer.replace(r"\frac", r"\dfrac")
        yield answer.replace(r"\frac", r"\tfrac")
    if r"\dfrac" in answer:
        yield answer.replace(r"\dfrac", r"\frac")


def _numbers(answer: str, value: Fraction) -> Iterator[str]:
    sign, above, below = "-" if value < 0 else "", abs(value.numerator), value.denominator
    yield rf"\text{{{sign}{above}}}" if below == 1 else rf"{sign}\frac{{{above}}}{{{below}}}"
    if below == 1:
        yield f"{sign}{above}.0"
        yield rf"{sign}{above} \text{{ apples}}"
        yield rf"\${sign}{above}"
        yield rf"\frac{{{sign}{2 * above}}}{{2}}"
        yield f"{sign}{above}/1"
        yield rf"{sign}{above}\text{{ cm}}^2"
        if above >= 1000:
            yield f"{sign}{above:,}"
            yield f"{sign}{above:,}".replace(",", "{,}")
            yield f"{sign}{above:,}".replace(",", r"\,")
        return
    yield f"{sign}{above}/{below}"
    yield rf"\frac{{{sign}{above}}}{{{below}}}"
    yield rf"{sign}\frac{{{3 * above}}}{{{3 * below}}}"
    yield rf"{sign}{above} \div {below}"
    if above > below and not sign:
        yield rf"{above // below}\frac{{{above % below}}}{{{below}}}"
    if not (10**12) % below:
        yield f"{value.numerator / below:.12f}".rstrip("0")
        yield f"{value.numerator / below:.12f}".rstrip("0") + "0"
        yield rf"{100 * value.numerator / below:.10f}".rstrip("0").rstrip(".") + r"\%"


def _not_numbers(value: int) -> Iterator[str]:
    """Answers with a number in them that is right, which are not that number: remarks, lists, the question again."""
    other = value + 1
    yield rf"{value} \text{{, {other}, {other + 1}}}"
    yield rf"{value} \text{{ is wrong, it is {other}}}"
    yield rf"{value}\text{{ not}}"
    yield rf"{value} \text{{ ({other})}}"
    yield f"{other} = {value}"
    yield f"{value},{value}"
    yield f"[{value}]"
    yield f"({value - 1}+1)"
    yield f"x={value - 1}+1"
    yield rf"\left({value - 1}+1\right)"
    yield rf"{value - 1}+1\text{{ apples}}"
    yield f"{{{value - 1}}}+{{1}}"
    yield f"{value - 1}-(-1)"
    yield rf"1\cdot({value - 1}+1)"


BASED = re.compile(r"(\d+)_\{?(\d+)\}?")
SIGN = re.compile(r"(?<=[\w)}!])\s*(?<!\^)([-+])\s*(?=[\w(\\])")


def changed(answer: str) -> Iterator[str]:
    """An answer of any kind with one thing changed: a base, a number, the sign of a term, a bracket, or all of it."""
    if found := BASED.fullmatch(answer):
        yield from (f"{found[1]}_{int(found[2]) + 1}", f"{found[1]}_{{{found[2]}0}}", found[1])
    # math-verify solves two equations to compare them, which may never end with powers of e.
    numbers = list(re.finditer(r"\d+", "" if "=" in answer and "e^" in answer else answer))
    for number in {numbers[0], numbers[-1]} if numbers else ():
        yield f"{answer[: number.start()]}{int(number[0]) + 1}{answer[number.end() :]}"
    for sign in SIGN.finditer(answer):
        yield f"{answer[: sign.start()]} {'-' if sign[1] == '+' else '+'} {answer[sign.end() :]}"
    if r"\cup" in answer or TUPLE.fullmatch(answer):
        for bracket in re.finditer(r"[()\[\]]", answer):
            if "infty" not in answer[max(0, bracket.start() - 6) : bracket.end() + 7]:
                yield answer[: bracket.start()] + "[(])"["([)]".index(bracket[0])] + answer[bracket.end() :]
    if not RELATION.search(answer) and not any(each in answer for each in (",", r"\pm", "{0}")):
        yield f"-({answer})"
    if "," not in answer and r"\infty" not in answer:
        yield f"{answer} + 1"


def near_misses(answer: str) -> Iterator[str]:
    """Answers that are nearly right, each of them wrong."""
    if value_of(answer) is None:
        yield from changed(answer)
    yield from _near_misses(answer)


def _near_misses(answer: str) -> Iterator[str]:
    value = value_of(answer)
    if value is not None:
        if value:
            yield f"-{answer}" if value > 0 else answer.lstrip("-")
        for other in (value + 1, value - 1, value * 10, value + Fraction(1, 100)):
            if other != value:
                yield str(other.numerator) if other.denominator == 1 else f"{other.numerator}/{other.denominator}"
        if value not in (-1, 0, 1):
            yield f"{value.denominator}/{value.numerator}"
        if value.denominator == 1 and len(str(abs(value.numerator))) > 1:
            yield str(value.numerator)[:-1]
            yield str(value.numerator) + "0"
            yield str(value.numerator) + "7"
        if value.denominator == 1:
            yield from _not_numbers(value.numerator)
    elif found := TUPLE.fullmatch(answer):
        parts = [part.strip() for part in found[2].split(",")]
        if parts != parts[::-1]:
            yield f"{found[1]}{', '.join(parts[::-1])}{found[3]}"
        yield f"{found[1]}{', '.join(parts[:-1])}{found[3]}"
        yield f"{found[1]}{', '.join([*parts, '1'])}{found[3]}"
        if parts[-1] == r"\infty" and "infty" not in parts[0]:
            other = {"(": "[", "[": "("}[found[1]]
            yield f"{other}{', '.join(parts)}{found[3]}"
    elif found := MATRIX.fullmatch(answer):
        rows = [row.strip() for row in found[1].split(r"\\")]
        if rows != rows[::-1]:
            yield r"\begin{pmatrix}" + r" \\ ".join(rows[::-1]) + r"\end{pmatrix}"
    elif VALUE.fullmatch(answer) or re.fullmatch(r"[\d\\a-z{}^]*(?:pi|sqrt\{\d+\})", answer):
        yield f"-{answer}" if not answer.startswith("-") else answer[1:]
        yield f"{answer} + 1"
        yield f"2 \\cdot {answer}"
