# SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest

from tests.raising import raises
from whet.errors import DataError
from whet.rewards.exact_match import exact_match

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
