# SPDX-License-Identifier: Apache-2.0
import re
import time

import pytest

from tests.raising import raises
from whet.errors import DataError
from whet.plugins.scores.short_answers import crossthinkqa, extract_letter, multiple_choice


@pytest.mark.parametrize(
    ("text", "letter", "boxed"),
    [
        (r"so \boxed{B}", "B", True),
        (r"\boxed{(b)}", "B", True),
        (r"\boxed{\text{C}}", "C", True),
        (r"\boxed{\textbf{(D)}\ 24}", "D", True),
        (r"\boxed{C. Paris}", "C", True),
        (r"\boxed{A} no, \boxed{B}", "B", True),
        (r"\boxed{A, B}", None, False),
        (r"\boxed{Paris}, so the answer is C", "C", False),
        ("The answer is B.", "B", False),
        ("the correct answer is option (c)", "C", False),
        ("**Answer:** D", "D", False),
        ("**Answer: (D)**", "D", False),
        ("Answer is **E**", "E", False),
        ("The answer is A because of B", "A", False),
        ("The answer is A. No, the answer is B.", "B", False),
        ("Final answer: B) Paris", "B", False),
        ("the answer is a dog", None, False),
        ("The answer is I think unclear", None, False),
        ("The answer is not B", None, False),
        ("The answer is B or C", None, False),
        ("The answer is (B) or (C)", None, False),
        ("The answer is A, B and C", None, False),
        ("The answer is Bonn", None, False),
        ("The answer is B-12", None, False),
        ("B", "B", False),
        ("(b)", "B", False),
        (" **B** \n", "B", False),
        ("B.", "B", False),
        ("<think>A</think>\nB", "B", False),
        ("<answer>B</answer>", "B", False),
        ("Not A. <answer> (B) </answer> A", "B", False),
        ("<answer>A</answer> <answer>B. Paris</answer>", "B", False),
        (r"<answer>A</answer> \boxed{B}", "B", True),
        (r"<answer>\boxed{B}</answer>", "B", True),
        ("The correct option is B", "B", False),
        ("So the correct choice is **(b)**, as above.", "B", False),
        ("The right letter: B", "B", False),
        ("A is not right. B", None, False),
        ("A I", None, False),
        ("I think it is A here", None, False),
        ("A dog", None, False),
        ("B or C", None, False),
        ("<answer>B or C</answer>", None, False),
        ("<answer>A dog</answer>", None, False),
        ("<answer>B", None, False),
        ("The correct option is not B", None, False),
        ("The correct option is B or C", None, False),
        ("The option is B", None, False),
        ("Option B", None, False),
        ("BC", None, False),
        (r"<think>\boxed{A}</think> The answer is B", "B", False),
        (r"<think>\boxed{A}", "A", True),
        ("", None, False),
    ],
)
def test_the_letter_of_a_response(text, letter, boxed):
    assert extract_letter(text) == (letter, boxed)


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("(c)", "C"),
        ("A is wrong, thus D.", "D"),
        ("A or B", "B"),
        ("I think C", "C"),
        ("U.S. law", None),
        ("T-cells", None),
    ],
)
def test_the_last_lone_letter_by_option(text, letter):
    assert extract_letter(text, lone=True) == (letter, False)


@pytest.mark.parametrize("truth", ["B", "b", " (B) ", "B. Paris", "B) Paris", "**B**"])
def test_the_forms_of_a_ground_truth(truth):
    assert multiple_choice("The answer is B", truth) == {"reward": 1.0, "pred": "B"}
    assert multiple_choice("The answer is A", truth) == {"reward": 0.0, "pred": "A"}
    assert multiple_choice("B", truth) == {"reward": 1.0, "pred": "B"}
    assert multiple_choice("So B", truth) == {"reward": 0.0, "pred": None}
    assert multiple_choice("So B", truth, lone=True) == {"reward": 1.0, "pred": "B"}


@pytest.mark.parametrize("truth", ["Paris", "", "2", None, "A, B"])
def test_a_ground_truth_without_a_letter_is_an_error(truth):
    with raises(
        DataError, "ground_truth", found=None if truth is None else repr(truth), expected=re.compile(r"B, \(B\)")
    ):
        multiple_choice("The answer is B", truth)


@pytest.mark.parametrize(
    ("table", "rewards"), [("loose", (1, 1, -1, -1)), ("soft", (1, 0.5, -0.5, -1)), ("strict", (1, -1, -1, -1))]
)
def test_the_tables_of_crossthinkqa(table, rewards):
    responses = (r"\boxed{B}", "The answer is B", r"\boxed{A}", "The answer is A")
    found = [crossthinkqa(each, "B", table=table) for each in responses]
    assert tuple(each["reward"] for each in found) == rewards
    assert [(each["accuracy"], each["boxed"]) for each in found] == [(1, 1), (1, 0), (0, 1), (0, 0)]


def test_length_shaping_reaches_the_reward():
    """A term that is computed and never added is a fault seen elsewhere. 2 words of 4: 1 - 0.5 * 0.5 = 0.75."""
    assert crossthinkqa(r"So \boxed{B}", "B", longest=4)["reward"] == 0.75
    assert crossthinkqa("a b c d e " + r"\boxed{B}", "B", longest=4, length_weight=0.25)["reward"] == 0.75
    assert crossthinkqa(r"So \boxed{A}", "B", longest=4)["reward"] == -1.0


@pytest.mark.parametrize("unit", [r"\boxed{", "{", "answer is ", "A ", "(", "*", "A or "])
def test_a_long_response_is_read_at_once(unit):
    start = time.process_time()
    extract_letter(unit * (100_000 // len(unit)), lone=True)
    assert time.process_time() - start < 2.0
