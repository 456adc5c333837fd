# SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest

from tests.raising import raises
from whet.errors import DataError
from whet.rewards.short_answers import exact_match, normalise, search_qa, token_f1


@pytest.mark.parametrize(
    ("response", "truth", "exact", "f1"),
    [
        ("<answer>Paris</answer>", "Paris", 1, 1),
        ("<answer> the  PARIS! </answer>", "Paris", 1, 1),
        ("<answer>U.S.</answer>", "us", 1, 1),
        ("<answer>Rome</answer>", ["Paris", "Rome"], 1, 1),
        ("<answer>Rome</answer>", {"target": ["Paris", "Rome"]}, 1, 1),
        ("<answer>1912</answer>", 1912, 1, 1),
        ("<answer>Rome</answer><answer>Paris</answer>", "Paris", 1, 1),
        ("<think><answer>Rome</answer></think><answer>Paris</answer>", "Paris", 1, 1),
        ("<answer>Rome</answer></think>Paris", "Rome", 0, 0),
        ("Paris", "Paris", 0, 0),
        ("<answer>Paris", "Paris", 0, 0),
        # Two of three words are found, of two expected: 2 * 2 / (3 + 2).
        ("<answer>tall Eiffel Tower</answer>", "the Eiffel Tower", 0, 0.8),
        # "to be" against "to be or not to be": 2 * 2 / (2 + 6); the other truth shares nothing.
        ("<answer>to be</answer>", ["to be or not to be", "nothing"], 0, 0.5),
        ("<answer>to to to</answer>", "to be", 0, 0.4),  # 2 * 1 / (3 + 2): a word counts as often as it is expected
        ("<answer>-42</answer>", "42", 0, 0),
        ("<answer>4.2</answer>", "42", 0, 0),
        ("<answer>.5</answer>", "5", 0, 0),
        ("<answer>1,000.</answer>", "1000", 1, 1),
        ("<answer>-5 degrees</answer>", "-5 Degrees", 1, 1),
        ("<answer></answer>", "Paris", 0, 0),
        ("<answer>the</answer>", "Paris", 0, 0),
    ],
)
def test_exact_match_and_f1(response, truth, exact, f1):
    found = search_qa(response, truth)
    assert (found["reward"], found["accuracy"], found["exact"]) == (exact, exact, exact)
    assert found["f1"] == pytest.approx(f1)
    by_f1 = search_qa(response, truth, metric="f1")
    assert (by_f1["reward"], by_f1["accuracy"]) == (pytest.approx(f1), exact)


def test_without_the_tag_by_option():
    assert search_qa("Paris.", "paris", needs_tag=False)["reward"] == 1.0
    assert search_qa("<answer>Rome</answer> Paris", "Paris", needs_tag=False)["reward"] == 0.0


@pytest.mark.parametrize("truth", [[], None, {"target": []}, {}, ["a", None]])
def test_a_ground_truth_without_text_is_an_error(truth):
    found = None if truth is None else repr(truth)
    with raises(DataError, "ground_truth", found=found, change=re.compile("one")):
        search_qa("<answer>a</answer>", truth)


def test_normalisation_is_squads():
    assert normalise('The  cat\'s\tan "A-team" theory') == "cats ateam theory"
    assert token_f1("", "") == 1.0 and token_f1("a", "") == 0.0


TAGS = {"after": "<answer>", "before": "</answer>"}


@pytest.mark.parametrize(
    ("answer", "truth", "options", "score"),
    [
        ("Paris", "Paris", {}, 1.0),
        ("  New\n York ", "New York", {}, 1.0),
        ("NewYork", "New York", {}, 0.0),
        ("paris", "Paris", {}, 0.0),
        ("paris", "Paris", {"ignore_case": True}, 1.0),
        ("STRASSE", "Straße", {"ignore_case": True}, 1.0),
        ("Paris.", "Paris", {}, 0.0),
        ("\u201cParis\u201d.", "Paris", {"ignore_punctuation": True}, 1.0),
        ("the Paris", "Paris", {}, 0.0),
        ("the Paris", "Paris", {"ignore_articles": True}, 1.0),
        ("An apple", "apple", {"ignore_articles": True}, 1.0),
        ("thesis", "sis", {"ignore_articles": True}, 0.0),
        ("\uff17\uff12", "72", {}, 1.0),  # full-width digits
        ("cafe\u0301", "caf\u00e9", {}, 1.0),  # an accent of its own
        ("72", 72, {}, 1.0),
        ("72.0", 72, {}, 0.0),
        ("7 + 8 = 15", "15", {"after": "="}, 1.0),
        ("a = 1, b = 2", "2", {"after": "="}, 1.0),
        ("15", "15", {"after": "</think>"}, 0.0),
        ("<think>15</think>16", "15", {"after": "</think>"}, 0.0),
        ("<answer>London</answer>", "London", {"after": "<answer>", "before": "</answer>"}, 1.0),
        ("is it <answer>Rome</answer>? <answer> London </answer>.", "London", TAGS, 1.0),
        ("<answer>London</answer> <answer>Rome</answer>", "London", TAGS, 0.0),
        ("<answer>London", "London", TAGS, 0.0),
        ("London</answer>", "London", {"before": "</answer>"}, 1.0),
        ("London</answer>", "London", TAGS, 0.0),
        ("Rome", ["Paris", "Rome"], {}, 1.0),
        ("Bonn", ("Paris", "Rome"), {}, 0.0),
        ("", "", {}, 1.0),
        # nothing is left of these ground truths
        ("", "The", {"ignore_articles": True}, 0.0),
        ("", "?!", {"ignore_punctuation": True}, 0.0),
        ("B", "A", {"ignore_articles": True}, 0.0),
        ("A", "A", {"ignore_articles": True}, 1.0),
        ("a", "A", {"ignore_articles": True, "ignore_case": True}, 1.0),
        ("the", "A", {"ignore_articles": True}, 0.0),
        ("", "", {"ignore_articles": True, "ignore_punctuation": True}, 1.0),
        ("", ["Paris", "The"], {"ignore_articles": True}, 0.0),
        # a list column of pandas
        ("Rome", np.array(["Paris", "Rome"], dtype=object), {}, 1.0),
        ("Rome", np.array(["Paris"]), {}, 0.0),
        ("Rome", np.array("Rome"), {}, 1.0),
    ],
)
def test_strings_are_equal_or_not(answer, truth, options, score):
    assert exact_match(answer, truth, **options)["reward"] == score


def test_what_was_compared_is_said():
    assert exact_match("so =  THE  two ", "2", after="=", ignore_case=True) == {"reward": 0.0, "pred": "the two"}
    assert exact_match("two", "2", after="=") == {"reward": 0.0, "pred": None}


@pytest.mark.parametrize("truth", [None, [], [None], np.array([])])
def test_no_ground_truth_is_an_error(truth):
    with raises(DataError, "ground_truth", found=None if truth is None else re.compile(re.escape(repr(list(truth))))):
        exact_match("", truth)


def test_a_lone_surrogate_is_a_letter_like_any_other():
    options = {"ignore_case": True, "ignore_punctuation": True, "ignore_articles": True}
    assert exact_match("a \ud800.", "\ud800", **options)["reward"] == 1.0
    assert exact_match("\ud800", "\udfff")["reward"] == 0.0
