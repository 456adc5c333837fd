# SPDX-License-Identifier: Apache-2.0
import json
import logging
import threading
from pathlib import Path

import pytest

from whet.rewards.math import compute_score as judge, extract_answer, is_equal, vote

BENCHMARKS = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "math" / "benchmarks.jsonl"


def compute_score(answer, truth):
    return judge(answer, truth)["reward"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{1}, no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}} is it", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{3}", "3"),
        (r"\boxed {3}", "3"),
        (r"\boxed{1} then \boxed{\frac{2", "1"),
        (r"\boxed{3}. The answer is 4", "3"),
        ("The answer is 3.5.", "3.5"),
        ("The answer is: $x$. It took 7 steps.", "$x$"),
        ("The answer is 1. No, the Answer\nis 2", "2"),
        ("The answer is\n12", "12"),
        ("2 + 2 = 4", "4"),
        ("about 1,234.5 of 10", "10"),
        ("about 1,234.5", "1,234.5"),
        ("from 3 to -5", "from 3 to -5"),
        (r"<think>\boxed{3}</think> It is 4", "4"),
        (r"<think>\boxed{3}</think> Hmm", None),
        ("</think>1</think> 2", "2"),
        ("I do not know", None),
        ("", None),
    ],
)
def test_the_answer_is_taken_from_the_text(text, answer):
    assert extract_answer(text) == answer


EQUAL = [
    (r"\frac{1}{2}", "0.5"),
    (r"\frac12", "1/2"),
    (r"\dfrac{2}{4}", r"\frac{1}{2}"),
    (r"3\frac{1}{2}", "3.5"),
    ("1,000", "1000"),
    ("72.0", "72"),
    ("2x + 1", "1 + 2x"),
    ("(x - 1)(x + 1)", "x^2 - 1"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"(3, \pi/2)", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"\{1, 2\}", r"\{2, 1\}"),
    ("x = 3", "3"),
    (r"50\%", "50"),
    (r"90^\circ", "90"),
    (r"10 \text{ cm}", "10"),
    (r"\$5", "5"),
    (r"\text{east}", "east"),
    (r"\text{(C)}", "C"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "\\begin{pmatrix}1.0\\\\\n2\\end{pmatrix}"),
    ("**$42$**", "42"),
    (r"\[ 3 \]", "3"),
    (r"\displaystyle .5", "0.50"),
    # A decimal for a number that has no finite one: rounded or cut off, at six digits and places or more.
    ("0.333333", r"\frac{1}{3}"),
    (r"\frac{1}{3}", "0.333333"),
    ("3.141593", r"\pi"),
    ("3.1415926", r"\pi"),
    ("1.4142135623730951", r"\sqrt{2}"),
    ("33.333333", r"\frac{100}{3}"),
    ("0.66666666", "2/3"),
    ("(0.333333, 2)", r"(\frac{1}{3}, 2)"),
    (r"33.333333\%", r"\frac{1}{3}"),
    # Exactly, however small or large.
    (r"1.60 \times 10^{-19}", r"1.6 \times 10^{-19}"),
    (r"0.5\sqrt{2}", r"\frac{\sqrt{2}}{2}"),
    ("0.5x", r"\frac{x}{2}"),
    (r"(\sqrt{2} + \sqrt{3})^2", r"5 + 2\sqrt{6}"),
    ("1267650600228229401496703205376.0", "2^{100}"),
    # Notations that a parser drops.
    ("x = 101_{2}", "101_2"),
    (r"\left(1, 2\right)", "(1,2)"),
    ("(1,2), (3,4)", r"\{(1,2), (3,4)\}"),
    ("(1, 2)", "1, 2"),
    ("3:2", r"\frac{3}{2}"),
    ("x = 12:30", "12:30"),
    ("05:30", "5:30"),
    ("7:20 am", "7:20"),
    (r"\cos(20^\circ)", r"\cos 20^{\circ}"),
    (r"\sin^2 20°", r"(\sin 20^\circ)^2"),
    (r"\frac{1}{2}", r"\cos 60^\circ"),
    # Inequalities.
    ("x>3", r"(3, \infty)"),
    ("3 < x", r"(3, \infty)"),
    (r"x \ge 3", r"[3, \infty)"),
    (r"x \leq 3", r"(-\infty, 3]"),
    (r"2 \ge x > 1", "(1, 2]"),
    (r"x < 2 \text{ or } x > 3", r"(-\infty, 2) \cup (3, \infty)"),
    (r"x \le -\frac{1}{2} \text{ or } 1 < x < 2", r"(-\infty, -\frac{1}{2}] \cup (1, 2)"),
]
DIFFERENT = [
    ("0.33", r"\frac{1}{3}"),
    ("0.33333", r"\frac{1}{3}"),
    ("0.3333334", r"\frac{1}{3}"),
    ("0.333333", r"\frac{333334}{1000000}"),
    ("0.333333", "0.3333333"),
    ("0.666666", "2/3"),
    ("3.14159", r"\pi"),
    ("3.141594", r"\pi"),
    ("0.00000007", r"\frac{1}{13983816}"),
    ("0.5000001", r"\frac{1}{2}"),
    ("1.0000001", "1"),
    ("AB = BA + 1", "AB = BA"),
    ("R = I + 1", "R = I"),
    ("10.0000004", "10"),
    ("x = 10.0000004", "10"),
    ("9.99999999", r"\frac{20}{2}"),
    ("(1, 2.0000001)", "(1, 2)"),
    ("0", "0.0000003"),
    ("0.0000001", "0.0000003"),
    (r"1.6 \times 10^{-19}", r"9.1 \times 10^{-31}"),
    (r"6.63 \times 10^{-34}", r"6.02 \times 10^{-34}"),
    (r"1.6 \times 10^{-19} x", r"9.1 \times 10^{-31} x"),
    ("10^{-20}", "10^{-21}"),
    (r"10^{-20}\sqrt{2}", r"10^{-20}\sqrt{3}"),
    (r"\{10^{-20}\}", r"\{10^{-21}\}"),
    ("10^{50} + 1", "10^{50}"),
    (r"\sqrt{2} + 10^{-40}", r"\sqrt{2}"),
    ("1267650600228229401496703205377", "2^{100}"),
    ("101_3", "101_2"),
    ("101", "101_2"),
    ("5", "101_2"),
    ("10_2", "10"),
    ("10_2", "2"),
    (r"\{1,2\}", "(1,2)"),
    ("(1,2)", r"\{1,2\}"),
    (r"x = \{1,2\}", "(1,2)"),
    ("12:30", "12/30"),
    ("2/5", "12:30"),
    ("12:45", "12:30"),
    (r"\cos 20", r"\cos 20^\circ"),
    (r"\cos 20^\circ", r"\cos 20"),
    (r"\cos 21^\circ", r"\cos 20^\circ"),
    ("x>3", r"[3, \infty)"),
    (r"x \ge 3", r"(3, \infty)"),
    ("x<3", r"(3, \infty)"),
    ("x>3", r"(-\infty, 3)"),
    ("3 > x", r"(3, \infty)"),
    ("1 < x > 2", "(1, 2)"),
    ("x > 3 and 5", r"(3, \infty)"),
    (r"x \le 2 \text{ or } x > 3", r"(-\infty, 2) \cup (3, \infty)"),
    (r"x < 2 \text{ or } x > 4", r"(-\infty, 2) \cup (3, \infty)"),
    (r"x < 2 \text{ and } x > 3", r"(-\infty, 2) \cup (3, \infty)"),
    (r"x < 2", r"(-\infty, 2) \cup (3, \infty)"),
    ("3", "-3"),
    ("x + 1", "x - 1"),
    ("[1, 2)", "[1, 2]"),
    ("(1, 2)", "(2, 1)"),
    (r"-\infty", r"\infty"),
    ("5", "five"),
    ("", "5"),
    ("", ""),
    ("}{", "5"),
    (r"\frac{1}{", "1"),
    ("$", "5"),
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_the_same_value_is_equal_however_it_is_written(answer, truth):
    assert is_equal(answer, truth)
    assert compute_score(f"so \\boxed{{{answer}}}", truth) == 1.0
    assert compute_score(f"so \\boxed{{{answer}}}", f"\\boxed{{{truth}}}") == 1.0


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_another_value_is_not_equal(answer, truth):
    assert not is_equal(answer, truth)


def test_numbers_as_ground_truth_and_no_answer():
    assert compute_score("it is 4", 4) == 1.0
    assert compute_score("it is 4.0", 4.0) == 1.0
    assert compute_score("it is unknown", 4) == 0.0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("025", "25.0", True),
        ("1,000", "$1000$", True),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        (r"\left( 3, 4 \right)", "(3,4)", True),
        ("123456789012345678901234567890.0", "123456789012345678901234567890", True),
        ("123456789012345678901234567891", "123456789012345678901234567890", False),
        ("-3", "3", False),
        (r"a \leftarrow b", "ab", False),
        ("0.5", r"\frac{1}{2}", False),  # equal, but a vote does not parse
    ],
)
def test_a_vote_is_a_number_by_value_and_all_else_by_its_text(one, other, same):
    assert (vote(one) == vote(other)) is same


def test_what_was_read_from_the_text_is_said():
    assert judge(r"so \boxed{ 072 }.", 72) == {"reward": 1.0, "pred": "72"}
    assert judge("none", 72) == {"reward": 0.0, "pred": None}


def test_it_works_outside_the_main_thread_and_says_nothing(caplog):
    results = []
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=lambda: results.append(compute_score(r"\boxed{0.5}", r"\frac{1}{2}")))
        thread.start()
        thread.join()
    assert results == [1.0]
    assert caplog.records == []


@pytest.mark.skipif(not BENCHMARKS.exists(), reason=f"{BENCHMARKS} is not there")
def test_published_answers_parse_and_differ_from_each_other():
    answers = [str(json.loads(line)["answer"]) for line in BENCHMARKS.read_text().splitlines()]
    assert len(answers) == 560
    some = answers[::4]
    for answer, other in zip(some, some[1:] + some[:1], strict=True):
        # Another text of the same value, so that math-verify has to say that they are equal.
        assert compute_score(f"\\boxed{{\\displaystyle {answer}}}", answer) == 1.0, answer
        if answer.isdecimal() and other.isdecimal():
            assert compute_score(f"\\boxed{{{other}}}", answer) == float(int(answer) == int(other))


@pytest.mark.parametrize(
    "prompt", ["Simplify $\\sqrt{16}$.", "Write 2 + 2 as one number, if there is one, and call it 4."]
)
def test_the_prompt_repeated_is_no_answer(prompt):
    assert judge(prompt, "4")["reward"] == 1.0
    for echo in (prompt, f"{prompt} {prompt}", f"Well. {prompt}\n"):
        assert judge(echo, "4", prompt) == {"reward": 0.0, "pred": None}
    for right in (f"{prompt}\n4", f"{prompt} That is 4.", f"\\boxed{{4}} {prompt}", "4"):
        assert judge(right, "4", prompt)["reward"] == 1.0


@pytest.mark.parametrize("truth", [["\\frac{1}{2}", "7"], '["\\\\frac{1}{2}", "7"]', '[\n "1/2","7"]'])
def test_one_of_several_truths_is_enough(truth: object) -> None:
    scores = [compute_score(rf"\boxed{{{answer}}}", truth) for answer in ("0.5", "7", "8", "1/2, 7")]
    assert scores == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("truth", ["[1, 2]", '["half', "[2, 3)", '["a", 3]'])
def test_other_brackets_are_a_truth_of_their_own(truth: str) -> None:
    assert compute_score(rf"\boxed{{{truth}}}", truth) == 1.0
