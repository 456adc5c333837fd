# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 - lists of units
"""`math` on answers in many notations, with verdicts by hand; units in all of them; and math-verify itself."""

from __future__ import annotations

import logging
import time

import pytest
from math_verify.metric import math_metric
from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

from tests.first import first
from tests.rewards.math_variants import ROWS
from whet.registry import REWARDS
from whet.rewards.math import compute_score, extract_answer, vote
from whet.rewards.math_read import split_unit
from whet.rewards.math_tex import clean


def wrong_verdicts(rows: list[tuple[str, str, int]], response: str = r"So \boxed{%s}") -> list[tuple[str, str, int]]:
    return [row for row in rows if compute_score(response % row[1], row[0])["reward"] != row[2]]


def test_answers_in_many_notations() -> None:
    assert len(ROWS) > 900
    assert wrong_verdicts(ROWS[::16]) == []


@pytest.mark.slow
def test_all_answers_in_many_notations() -> None:
    assert wrong_verdicts(ROWS) == []
    plain = [
        row
        for row in ROWS
        if "$" not in row[1] and "box" not in row[1] and "text{" not in row[1] and row[1][-1] not in "-+/_"
    ]
    assert wrong_verdicts(plain, r"The answer is \(%s\).") == []


# A unit, and one that is another, whatever its size.
OTHER_UNITS = (
    "km m, cm m, km/h m/s, kg g, hours minutes, dollars cents, inches feet, m^2 m, m^2 m^3, cm^2 m^2, N J, L mL, mi km, lb oz, "
    "s min, gallons liters, W kW, V A, yards feet, days weeks, months years, mph km/h, euros dollars, MB GB, acres hectares, "
    "mol g, Hz kHz, tons kg, quarts gallons, radians degrees, m/s m/s^2, Pa N, calories joules, pounds kg, Ω V, °C °F, "
    "light-years years, fl.oz oz, nautical-miles miles, ml liters, units square-units, AU km, Wb Hz, Bq Ci, Å m, mmHg Pa, rpm rev/s, "
    "Mbps kbps, arcminutes minutes, dollars rubles, pesos euros"
)
SAME_UNITS = (
    "km/h=kilometers per hour, m=meters, cm^2=square centimeters, in^2=square inches, in^2=sq in, ft^3=cubic feet, hr=hours, "
    "mph=miles per hour, mph=mi/h, min=minutes, s=seconds, kg=kilograms, L=liters, lb=pounds, oz=ounces, cents=¢, dollars=USD, "
    "m/s=meters per second, m/s^2=meters per second squared, J=joules, N=newtons, kWh=kilowatt-hours, m^2=meters squared, "
    "m^2=square metres, dollars=dollar, yd=yards, mL=milliliters, km/h=kmh, km/h=kph, feet=ft, inches=in, inches=in., years=yr, "
    "gal=gallons, °C=degrees Celsius, °F=degrees Fahrenheit, V=volts, Hz=hertz, mi=miles, 元=yuan, ft/s=feet per second, "
    "mL=ml, ml=milliliters, light years=light-years, ly=light years, fluid ounces=fl oz, rpm=revolutions per minute, square units=units^2"
)
RESPONSES = [
    r"\boxed{%s}",
    "The answer is $%s$.",
    r"The answer is \(%s\).",
    "The answer is %s.",
    "<answer>%s</answer>",
    r"Final answer: $\boxed{%s}$",
    "So it is $%s$.",
]


def written(unit: str) -> list[str]:
    base, _, power = unit.partition("^")
    found = [rf"5\text{{ {unit}}}", f"5 {unit}"]
    if power:
        return [
            *found,
            rf"5\text{{ {base}}}^{power}",
            rf"5\,\mathrm{{{base}}}^{{{power}}}",
            f"5 {base}{'²³'[int(power) - 2]}",
        ]
    return [*found, rf"5\,\mathrm{{{unit}}}", rf"5\ \text{{{unit}}}", rf"5 \mbox{{ {unit}}}"]


@pytest.mark.slow
def test_a_unit_is_the_same_or_another_in_every_form() -> None:
    pairs = [(one, other, 0) for one, other in map(str.split, OTHER_UNITS.split(", "))]
    pairs += [(*pair.split("="), 1) for pair in SAME_UNITS.split(", ")]  # type: ignore[misc]
    pairs += [(one, one, 1) for one, _, _ in pairs]
    pairs += [(other, one, same) for one, other, same in pairs]
    rows = [
        (truth, answer, same)
        for one, other, same in pairs
        for truth in (rf"5\text{{ {one}}}", f"5 {one}")
        for answer in written(other)
    ]
    found = [(response, *row) for response in RESPONSES for row in wrong_verdicts(rows, response)]
    assert found == [] and len(rows) * len(RESPONSES) > 9000
    number = [("5", answer, 1) for one, _, _ in pairs for answer in written(one)]
    assert [row for response in RESPONSES for row in wrong_verdicts(number, response)] == []


SENTENCES = [
    ("Final Answer: The largest $n$ is 34.", "34", 1),
    ("Final Answer: The largest $n$ is 34.", "n", 0),
    ("Final Answer: The largest $n$ is $34$.", "34", 1),
    (r"Answer: The probability that $X > 3$ is $\frac{1}{4}$", "X>3", 0),
    (r"Answer: The probability that $X > 3$ is $\frac{1}{4}$", r"\frac14", 1),
    (r"The answer is the value of $x$, which is $5$.", "5", 1),
    ("The answer is $5$ because $2+3=5$ and $x=7$.", "5", 1),
    ("The answer is 5 because 2 + 3 is 5.", "5", 1),
    ("Answer: $n$ is 34", "34", 1),
    ("Answer: $n = 34$", "34", 1),
    ("Answer: $n$ = 34", "34", 1),
    ("Answer: The equation $x^2=4$ has 2 solutions.", "2", 1),
    ("Answer: The number of solutions of $x^2=4$ in $[0,5]$ is 1.", "1", 1),
    ("The final answer is: the minimum of $f(x)=x^2+1$ on $[0,1]$ equals $1$.", "1", 1),
    ("Answer: the sum $a+b$ is equal to $\\frac{7}{2}$.", "3.5", 1),
    ("Answer: for $n=5$ the sum is 15", "15", 1),
    ("The answer is $x$.", "x", 1),
    ("The answer is: $x$. It took 7 steps.", "x", 1),
    ("The answers are $x=1$ and $x=2$.", r"\{1,2\}", 1),
    ("The answer is a third of 9.", "9", 0),
    ("Answer: there are 5 ways.", "5", 1),
    ("Answer: The largest $n$ is\n34.", "34", 1),
    ("**Final Answer:** The value of $k$ is **7**.", "7", 1),
    ("**Answer:** The area of triangle $ABC$ is $12$ square units.", "12", 1),
    ("Answer: The polynomial $P(x)$ is $x^2+1$.", "x^2+1", 1),
    ("Answer: Angle $A$ is $30^\\circ$ and angle $B$ is $60^\\circ$.", "60", 1),
    ("The answer is that the point $P$ has coordinates $(1,2)$.", "(1,2)", 1),
    ("Final Answer: $\\angle ABC = 40^\\circ$.", "40", 1),
    ("The answer is not 5 but the largest $n$ is 34.", "34", 1),
    ("Answer: $f$ is increasing on $(0,1)$.", "(0,1)", 1),
    ("The answer is 2 + 2 = 4.", "4", 1),
    ("The answer is about 3.", "3", 1),
    ("The answer is $34$ where $n$ is the largest.", "34", 1),
    ("The answer is $\\frac{1}{4}$, the probability that $X>3$ is true.", "1/4", 1),
    ("Answer: 7, since $x$ is 3.", "7", 1),
    ("Answer: 12 (the number of edges is 12 and vertices is 8)", "12", 1),
    ("Final Answer: The final answer is $12$. I hope it is correct.", "12", 1),
    ("Final Answer: the maximum value is $M = 12$.", "12", 1),
    ("The answer is 5 cents.", "5\\text{ cents}", 1),
    ("The answer is 5 cents.", "\\$5", 0),
    ("The answer is $5$ meters.", "5\\text{ m}", 1),
    ("The answer is $5$ m.", "5\\text{ cm}", 0),
    ("The answer is 5 km/h.", "5\\text{ km/h}", 1),
    ("The answer is 5 m/s.", "5\\text{ km/h}", 0),
    ("So she walked 5 miles.", "5\\text{ km}", 0),
    ("So she walked 5 miles.", "5\\text{ miles}", 1),
    ("It is 864 square inches.", "864 \\mbox{ inches}^2", 1),
    ("It is 864 square feet.", "864 \\mbox{ inches}^2", 0),
    ("It is 864 in².", "864 \\mbox{ inches}^2", 1),
    ("There are 5 in total.", "5\\text{ cm}", 1),
    ("The area is $15$ cm$^2$.", "15\\mbox{ cm}^2", 1),
    ("The area is $15$ cm$^3$.", "15\\mbox{ cm}^2", 0),
    ("The answer is $5\\text{ m}$.", "5\\text{ km}", 0),
    ("The answer is \\(5\\text{ m}\\).", "5\\text{ km}", 0),
    ("<answer>5 m</answer>", "5\\text{ km}", 0),
    ("<answer>5 km</answer>", "5\\text{ km}", 1),
    ("The answer is 5\\text{ m}.", "5\\text{ km}", 0),
    ("\\[5\\text{ m}\\]", "5\\text{ km}", 0),
    ("It is $5$ meters, so.", "5\\text{ km}", 0),
    ("The roots are 5, 125.", "5, 125", 1),
    ("The roots are 5, 125.", "3", 0),
    (r"\boxed{2, 100}", "3", 0),
    (r"\boxed{2, 100}", "2, 100", 1),
    (r"\boxed{100, 2}", "2, 100", 1),
    (r"\boxed{1, 234}", "1234", 0),
    (r"\boxed{32,349}", "32, 349", 0),
    (r"\boxed{32, 349}", "32, 349", 1),
    (r"\boxed{349, 32}", "32, 349", 1),
    (r"\boxed{1,234}", "1234", 1),
    (r"\boxed{2, 100, 300}", "2", 0),
    (r"\boxed{1, 234.5}", "1234.5", 0),
    (r"\boxed{-1, 234}", "-1234", 0),
    (r"x = 1, 234", "1234", 0),
    (r"\boxed{5}\text{ m}", "5\\text{ km}", 0),
    (r"So $\boxed{5}\,\mathrm{km}$.", "5\\text{ km}", 1),
    (r"So $\boxed{5}$ meters.", "5\\text{ km}", 0),
    (r"\[\boxed{5}\text{ km}^2\]", "5\\text{ km}^2", 1),
    (r"\[\boxed{5}\text{ km}^3\]", "5\\text{ km}^2", 0),
    (r"\boxed{5} m/s", "5\\text{ km/h}", 0),
    (r"\boxed{5}. It is 5 m.", "5\\text{ km}", 1),
    (r"\boxed{5} in meters", "5\\text{ km}", 1),
    ("Answer: $34$ is the largest $n$.", "34", 1),
    ("Answer: The largest $n$ must be 34.", "34", 1),
    ("Answer: The largest $n$ turns out to be $34$.", "34", 1),
    ("Answer: The largest $n$ comes out at 34.", "34", 1),
    ("Answer: The number of primes below 100 is 25.", "25", 1),
    ("Answer: The number of primes below 100 is 25.", "100", 0),
]


@pytest.mark.parametrize(("text", "truth", "expected"), SENTENCES)
def test_the_answer_of_a_sentence(text: str, truth: str, expected: int) -> None:
    assert compute_score(text, truth)["reward"] == expected


def test_a_unit_is_read_in_a_sentence_where_the_truth_has_one() -> None:
    assert extract_answer("It is 5 square feet.", r"5\text{ m}") == "5 square feet"
    assert extract_answer("It is 5 in all.", r"5\text{ m}") == extract_answer("It is 5 feet.", "5") == "5"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (r"\left(3,\dfrac\pi2\right)", r"(3,\frac{\pi}{2} )"),
        (r"{\Large\bf 42}", "42"),
        ("2½", r"2\frac{1}{2}"),
        ("x⁻²", "x^{-2}"),
        (r"\sqrt[3]x", r"\sqrt[3]{x}"),
        (r"{a \over b}", r"\frac{a}{b}"),
        (r"\begin{pmatrix} 1 \\[2pt] 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"\frac{1}{", r"\frac{1}{"),
        ("}{", "}{"),
    ],
)
def test_the_rules_of_tex(text: str, read: str) -> None:
    assert clean(text) == read


@pytest.mark.parametrize("text", ["60x", "2abc", "3R^{2}", "x + c", "42e", r"\text{Evelyn}", r"5 \text{or} 6", "3i"])
def test_letters_that_are_no_unit(text: str) -> None:
    amount = split_unit(text)
    assert amount is not None and (amount.text, amount.unit) == (text, frozenset())


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (r"\Large 42", "42", True),
        ("42 apples", "42", True),
        ("42 m", "42", False),
        ("2, 100", "2,100", False),
        ("2,100", "2100", True),
    ],
)
def test_what_a_vote_counts_as_one(one: str, other: str, same: bool) -> None:
    assert (vote(one) == vote(other)) is same


@pytest.mark.parametrize(
    "piece",
    first(
        1,
        ["a", "a.", ",", "{", "^", "√(", r"\text{a}", r"\frac", r"a\over ", "x,", "...", r"\quad"],
        others=pytest.mark.slow,
    ),
)
def test_long_answers_are_read_in_time(piece: str) -> None:
    start = time.process_time()
    for truth in (r"5\text{ m}", r"2k\pi, k\in\mathbb{Z}"):
        assert compute_score(rf"\boxed{{60 {piece * (480 // len(piece))}0}}", truth)["reward"] == 0.0
    assert time.process_time() - start < 5


def test_math_verify_is_what_verl_calls(caplog: pytest.LogCaptureFixture) -> None:
    metric = math_metric((LatexExtractionConfig(),), (ExprExtractionConfig(), LatexExtractionConfig()))  # of verl
    score = REWARDS["math_verify"].load()
    logging.getLogger("math_verify.metric").setLevel(logging.ERROR)
    for truth, answer, _ in ROWS[::60]:
        for response in (r"\boxed{%s}", "The answer is $%s$.", "So it is %s"):
            try:
                expected = metric(["\\boxed{" + truth + "}"], [response % answer])[0]
            except ValueError:  # a truth that math-verify cannot read, which verl scores 0
                expected = 0.0
            assert score(response % answer, truth)["reward"] == expected, (truth, response % answer)
    assert score(r"\boxed{5\text{ m}}", r"5\text{ km}")["reward"] == 1.0  # which `math` refuses
