# SPDX-License-Identifier: Apache-2.0
import re

import pytest

from tests.raising import raises
from whet.errors import DataError
from whet.plugins.scores.short_answers import normalise, search_qa, token_f1


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
