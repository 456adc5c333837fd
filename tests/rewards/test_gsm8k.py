# SPDX-License-Identifier: Apache-2.0
import json
import re
from pathlib import Path

import pytest

from tests.raising import raises
from whet.errors import ConfigError, DataError
from whet.rewards.gsm8k import compute_score

PUBLISHED = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "gsm8k" / "test.jsonl"


def numbers(answer, truth, **options):
    return {name: value for name, value in compute_score(answer, truth, **options).items() if name != "pred"}


def flexible(answer, truth):
    return compute_score(answer, truth)["reward"]


def strict(answer, truth):
    return compute_score(answer, truth, method="strict")["reward"]


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("She has 5 + 67 = 72", "72"),
        ("That makes 72.0 eggs.", "72"),
        ("That makes 72 eggs.", "72.00"),
        ("He pays $1,234.50.", "1234.5"),
        ("He pays $1,234,567!", "1234567"),
        ("It is -5", "-5"),
        ("He lost -$5.", "-5"),
        ("It is \u22125 degrees", "-5"),  # a typographic minus
        ("16-3", "3"),
        ("(4)-3", "3"),
        ("x = .5", "0.5"),
        ("\\boxed{18}", "18"),
        ("between 1,2,3", "3"),
        ("50%", 50),
        ("so 7.", 7.0),
        ("In step 1 **72** eggs", "72"),
        ("It is _72_", "72"),
        ("at $5/hour", "5"),
        ("48/2 = 24", "24"),
        ("<<16-3-4=9>>9 eggs", "9"),
    ],
)
def test_the_last_number_is_the_answer(answer, truth):
    assert numbers(answer, truth) == {"reward": 1.0, "accuracy": 1.0}


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("72, no, 73", "72"), ("-72", "72"), ("seventy-two", "72"), ("", "72"), ("7.2", "72"), ("1,2", "12")],
)
def test_another_last_number_is_wrong(answer, truth):
    assert numbers(answer, truth) == {"reward": 0.0, "accuracy": 0.0}


@pytest.mark.parametrize(
    ("answer", "part"),
    [
        ("the probability is 2/3", "3"),
        ("10^6", "6"),
        ("10^-6", "-6"),
        ("10**6", "6"),
        ("x^2", "2"),
        ("10^x", "10"),
        ("x_2", "2"),
        ("1e6", "6"),
        ("1e-6", "6"),
        (r"\frac{1}{2}", "2"),
        (r"\boxed{\frac{1}{ 2 }}", "2"),
        (r"2\sqrt{5}", "5"),
        ("(1 + 2) / 3", "3"),
    ],
)
def test_a_part_of_a_fraction_a_power_or_a_root_is_no_answer(answer, part):
    assert compute_score(answer, part, format_score=0.1) == {"reward": 0.0, "accuracy": 0.0, "pred": None}
    assert flexible(f"{answer} = 7", "7") == 1.0
    with raises(DataError, "ground_truth", found=repr(answer)):
        compute_score("7", answer)


@pytest.mark.parametrize(
    "answer",
    [
        "#### 5 or 6",
        "#### 5, 6",
        "#### 5,6",
        "#### 5-6",
        "#### 5 to 6",
        "#### 5/6",
        "#### 5^2",
        "#### 5^n",
        "#### 5e3",
        "#### 5 + 1",
    ],
)
def test_strict_reads_a_number_that_stands_alone(answer):
    assert strict(answer, "5") == strict(answer, "6") == 0.0


@pytest.mark.parametrize(
    "answer", ["#### 5 eggs", "#### 5, or so", "#### 5\n- 6 is wrong", "#### 5 (3 + 2)", "#### $5/egg"]
)
def test_strict_reads_a_number_with_words_behind_it(answer):
    assert strict(answer, "5") == 1.0


def test_a_lone_surrogate_is_a_letter_like_any_other():
    assert flexible("\ud800 so 5", "5") == strict("\udfff #### 5\ud800", "5") == flexible("5", "\ud800#### 5") == 1.0


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("5 + 67\n#### 72", 1.0),
        ("#### 72. That took 3 steps", 1.0),
        ("####72", 1.0),
        ("#### $72.00", 1.0),
        ("#### 71\nNo:\n#### 72", 1.0),
        ("#### 72\nNo:\n#### 71", 0.0),
        ("the answer is 72", 0.0),
        ("#### the answer is 72", 0.0),
        ("### 72", 0.0),
        ("####", 0.0),
    ],
)
def test_strict_reads_the_number_behind_the_last_mark(answer, reward):
    assert strict(answer, "72") == reward


@pytest.mark.parametrize(
    ("answer", "pred"),
    [("so $1,072.00.", "1072"), ("-3.50", "-3.5"), ("100", "100"), ("no number", None), ("007", "7")],
)
def test_what_was_read_from_the_text_is_said(answer, pred):
    assert compute_score(answer, "72")["pred"] == pred


@pytest.mark.parametrize("method", ["flexible", "strict"])
@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("<think>#### 72</think>", 0.0),
        ("<think>It is 72.</think>So it is many.", 0.0),
        ("<think>#### 71</think>#### 72", 1.0),
        ("<think>#### 72</think>#### 71", 0.0),
    ],
)
def test_a_thought_is_no_answer(method, answer, reward):
    assert compute_score(answer, "72", method=method)["reward"] == reward


PROMPT = "Wendi feeds her flock in three meals. In the final meal she needs 20 cups, if the flock has 20 chickens?"


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (PROMPT, 0.0),
        (f"{PROMPT} {PROMPT}", 0.0),
        (f"Let me see. {PROMPT}\n", 0.0),
        (f"Well: {PROMPT[30:97]}", 0.0),  # a part of it
        (f"{PROMPT}\n20", 1.0),
        ("She needs 20 cups", 1.0),  # a few words of it
        ("20", 1.0),
    ],
)
def test_the_prompt_repeated_is_no_answer(answer, reward):
    assert compute_score(answer, "20", PROMPT)["reward"] == reward
    assert compute_score("What is 3 + 20?", "20", "What is 3 + 20?")["reward"] == 0.0


def test_a_ground_truth_as_published():
    truth = "Natalia sold 48/2 = <<48/2=24>>24 clips.\nAltogether 48+24 = <<48+24=72>>72 clips.\n#### 72"
    assert flexible("72", truth) == 1.0 and flexible("24", truth) == 0.0
    assert flexible("1070", "...\n#### 1,070") == 1.0


def test_the_format_score_is_for_a_wrong_number_and_is_no_accuracy():
    assert numbers("71", "72", format_score=0.1) == {"reward": 0.1, "accuracy": 0.0}
    assert numbers("72", "72", format_score=0.1) == {"reward": 1.0, "accuracy": 1.0}
    assert numbers("many", "72", format_score=0.1) == {"reward": 0.0, "accuracy": 0.0}
    assert numbers("71", "72", method="strict", format_score=0.1) == {"reward": 0.0, "accuracy": 0.0}


def test_a_ground_truth_without_a_number_and_an_unknown_method_are_errors():
    with raises(DataError, "ground_truth", found="'none'"):
        compute_score("72", "none")
    with raises(ConfigError, "method", found="loose", expected=re.compile("'flexible'.*'strict'")):
        compute_score("72", "72", method="loose")


@pytest.mark.skipif(not PUBLISHED.exists(), reason=f"{PUBLISHED} is not there")
def test_every_published_answer_scores_itself_and_not_the_next():
    answers = [json.loads(line)["answer"] for line in PUBLISHED.read_text().splitlines()]
    numbers = [float(answer.split("####")[1].replace(",", "")) for answer in answers]
    assert len(answers) == 1319
    for answer, number, other, other_number in zip(
        answers, numbers, answers[1:] + answers[:1], numbers[1:] + numbers[:1], strict=True
    ):
        assert flexible(answer, answer) == strict(answer, answer) == flexible(f"${number:,.2f}.", answer) == 1.0
        assert flexible(other, answer) == strict(other, answer) == float(number == other_number)
