# SPDX-License-Identifier: Apache-2.0
import json
import re
import time

import numpy as np
import pytest

from tests.first import first
from tests.raising import raises
from whet.errors import ConfigError, DataError
from whet.plugins.scores.perception import counting, detection, grounding, ocr, relative_error, rouge_l
from whet.registry import REWARDS


def box(*corners, label="cat", **more):
    return {"bbox_2d": list(corners), "label": label, **more}


ONE = [box(0, 0, 10, 10)]
TWO = [box(0, 0, 10, 10), box(20, 20, 30, 30, label="dog")]


@pytest.mark.parametrize(
    ("boxes", "truths", "iou"),
    [
        (ONE, ONE, 1.0),
        ([box(0, 0, 10, 5)], ONE, 0.5),
        ([box(5, 0, 15, 10)], ONE, 1 / 3),  # 50 shared of 150
        ([box(0, 0, 10, 10, label=" Cat ")], ONE, 1.0),
        ([box(0, 0, 10, 10, label="dog")], ONE, 0.0),
        ([box(20, 20, 30, 30)], ONE, 0.0),
        ([box(10, 10, 0, 0)], ONE, 0.0),  # corners in the wrong order
        (ONE, TWO, 0.5),  # one of two
        (TWO, ONE, 0.5),  # an additional box costs as much as a missing one
        (TWO[::-1], TWO, 1.0),
        ([*ONE, *ONE], ONE, 0.5),  # a truth is matched once
        # Each box overlaps the truths by 1 and 1/3; after the 1 a 1/3 stays: (1 + 1/3) / 2.
        ([box(0, 0, 10, 10), box(0, 0, 10, 10)], [box(0, 0, 10, 10), box(5, 0, 15, 10)], 2 / 3),
        ([*ONE, "box"], ONE, 0.5),  # a malformed box is a wrong box
        ([*ONE, box(0, 0, 10)], ONE, 0.5),
        ([*ONE, {"bbox_2d": [0, 0, float("inf"), 1], "label": "cat"}], ONE, 0.5),
        ([*ONE, box(0, 0, 10, 10**400)], ONE, 0.5),
        ([], ONE, 0.0),
    ],
)
def test_the_overlap_of_boxes(boxes, truths, iou):
    found = detection(json.dumps(boxes), truths)
    assert found["reward"] == found["iou"] == pytest.approx(iou)
    assert found["accuracy"] == (len(boxes) == len(truths) and iou in (0.5, 1.0))


@pytest.mark.parametrize(
    ("boxes", "truths", "thresholds", "expected"),
    [
        (ONE, ONE, (0.5,), 1.0),
        (ONE, TWO, (0.5,), 0.5),  # the cat is found, the dog is not
        ([box(0, 0, 10, 6)], ONE, (0.5, 0.75), 0.5),  # IoU 0.6 passes one of two thresholds
        # The wrong box is first by score: precision 1/2 at the only recall.
        ([box(0, 0, 10, 10, score=0.2), box(50, 50, 60, 60, score=0.9)], ONE, (0.5,), 0.5),
        ([box(0, 0, 10, 10, score=0.9), box(50, 50, 60, 60, score=0.2)], ONE, (0.5,), 1.0),
        # Hit, miss, hit of two truths: precisions 1 and 2/3, area (1 + 2/3) / 2.
        (
            [box(0, 0, 9, 9, score=3), box(50, 50, 60, 60, score=2), box(20, 20, 30, 30, score=1)],
            [box(0, 0, 9, 9), box(20, 20, 30, 30)],
            (0.5,),
            5 / 6,
        ),
        ([*ONE, box(0, 0, 1, 1, label="bird")], ONE, (0.5,), 0.5),  # a label that is not there
    ],
)
def test_mean_average_precision(boxes, truths, thresholds, expected):
    assert detection(json.dumps(boxes), truths, metric="map", thresholds=thresholds)["reward"] == pytest.approx(
        expected
    )


def test_no_thresholds_are_an_error():
    with raises(ConfigError, "thresholds", found=()):
        detection("[]", ONE, thresholds=())


def test_the_last_list_after_the_thought_counts():
    good, bad = json.dumps(ONE), json.dumps([box(5, 5, 6, 6)])
    for text in (f"{bad} or {good}", f"<think>{bad}</think>```json\n{good}\n```", f"{good} [1, 2] [see]"):
        assert detection(text, good)["reward"] == 1.0
    for text in ("", "no list", f"{good}</think>", good[:-1], f"{good} []"):
        assert detection(text, ONE)["reward"] == 0.0


@pytest.mark.parametrize("truth", [[], "none", None, [box(0, 0, 1)], [*ONE, {}]])
def test_a_ground_truth_without_boxes_is_an_error(truth):
    found = None if truth is None else re.compile(re.escape(repr(truth)[:70]))
    with raises(DataError, "ground_truth", found=found, expected=re.compile("bbox_2d")):
        detection("[]", truth)


@pytest.mark.parametrize(
    ("response", "truth", "wer"),
    [
        ("a b c d", "a b c d", 0.0),
        ("a x c d", "a b c d", 0.25),
        ("a c d", "a b c d", 0.25),
        ("a b b c d", "a b c d", 0.25),
        ("<think>no</think><answer>a b c d</answer> ok", "a b c d", 0.0),
        ("A b c d", "a b c d", 0.25),
        ("", "a b c d", 1.0),
        ("x " * 12, "a b c d", 3.0),
    ],
)
def test_word_errors(response, truth, wer):
    assert ocr(response, truth) == {"reward": max(0, 1 - wer), "accuracy": float(wer == 0), "wer": wer}


@pytest.mark.parametrize(
    ("response", "truth", "cer"),
    [
        ("stop", "stop", 0.0),
        ("st0p", "stop", 0.25),
        ("sto", "stop", 0.25),
        ("sttop", "stop", 0.25),
        ("go\n  on", "go on", 0.0),
        ("goon", "go on", 0.2),
        ("kitten", "sitting", 3 / 7),
    ],
)
def test_character_errors(response, truth, cer):
    found = ocr(f"<answer>{response}</answer>", truth, unit="character")
    assert found == {"reward": pytest.approx(1 - cer), "accuracy": float(cer == 0), "cer": pytest.approx(cer)}


@pytest.mark.parametrize(
    ("response", "iou"),
    [
        ("[0, 0, 10, 10]", 1.0),
        ("<think>[9, 9, 10, 10]</think> the box (0,0,10,5)", 0.5),
        ('{"bbox_2d": [5.0, 0, 15, 10]}', 1 / 3),
        ("[50, 50, 60, 60] or rather [ 0,0 , 10,10 ]", 1.0),
        ("[0e0, -0.0, 1.00000000000000000e1, 1E+1]", 1.0),
        ("[0.000000000001, .0, 5.000000000001, 10.]", 0.5),
        ("[10, 10, 0, 0]", 0.0),
        ("[0, 0, 10]", 0.0),
        ("", 0.0),
    ],
)
def test_the_overlap_of_one_box(response, iou):
    for truth in ([0, 0, 10, 10], "[0, 0, 10, 10]", {"bbox_2d": [0, 0, 10, 10]}):
        found = grounding(response, truth)
        assert found == {"reward": pytest.approx(iou), "accuracy": float(iou >= 0.5), "iou": pytest.approx(iou)}
        assert grounding(response, truth, metric="accuracy")["reward"] == float(iou >= 0.5)
    assert grounding(response, [0, 0, 10, 10], threshold=0.3)["accuracy"] == float(iou > 0.3)


def test_a_ground_truth_of_any_digits_is_read():
    for truth in (
        [1 / 7, 5e-05, 1 / 3, 0.5],
        np.array([1 / 7, 5e-05, 1 / 3, 0.5]),
        {"bbox": (1 / 7, 5e-05, 1 / 3, 0.5)},
    ):
        assert grounding(f"<answer>[{1 / 7}, 0.00005, {1 / 3}, 5e-1]</answer>", truth)["reward"] == pytest.approx(1)
    for truth in ([0, 0, 1], [0, 0, 1, float("nan")], [0, 0, 1, None], [], None):
        with raises(DataError, "ground_truth"):
            REWARDS["grounding"].check_row(truth, {}, "")


@pytest.mark.parametrize("name", ["relative_error", "counting"])
def test_a_number_with_an_exponent_is_one_number(name):
    assert REWARDS[name].load()("<answer>2e-05</answer>", 2e-05)["reward"] == 1.0
    assert REWARDS[name].load()("so 20", "2e1")["reward"] == 1.0
    with raises(DataError, "ground_truth"):
        REWARDS[name].check_row("about 2e-5", {}, "")  # neither 5 nor -5


@pytest.mark.parametrize(
    ("response", "tolerance", "reward", "accuracy"),
    [
        ("4", 0, 1.0, 1.0),
        ("5", 0, 0.0, 0.0),
        ("I see 2 and 2, so 4.", 0, 1.0, 1.0),
        ("<think>4</think><answer>3 cats</answer>", 1, 0.5, 0.0),
        ("<answer>6</answer>", 1, 0.0, 0.0),
        ("6", 3, 0.5, 0.0),
        ("many", 3, 0.0, 0.0),
    ],
)
def test_counts(response, tolerance, reward, accuracy):
    found = counting(response, "4", tolerance=tolerance)
    assert (found["reward"], found["accuracy"]) == (pytest.approx(reward), accuracy)


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("A man, running!", "a man running", 1.0),
        ("a man sits", "a man runs fast", 4 / 7),  # two words in common: 2 * 2 / (3 + 4)
        ("fast runs man a", "a man runs fast", 0.25),  # in order only one: 2 * 1 / 8
        ("", "a man", 0.0),
        ("-42", "42", 0.0),
    ],
)
def test_the_longest_common_subsequence(response, truth, score):
    assert rouge_l(response, truth)["reward"] == pytest.approx(score)


@pytest.mark.slow
def test_rouge_is_that_of_rouge_score():
    scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="rouge-score is not installed").RougeScorer(
        ["rougeL"]
    )
    pairs = [
        ("police killed the gunman in 2 days", "The gunman: police-killed, in two days"),
        ("a b c a b c", "a c b a c"),
        ("It's 5.5 m", "its 5 5m"),
    ]
    for response, truth in pairs:
        assert rouge_l(response, truth)["reward"] == pytest.approx(scorer.score(truth, response)["rougeL"].fmeasure)


@pytest.mark.parametrize(
    ("response", "truth", "score", "accuracy"),
    [
        ("40", 40, 1.0, 1.0),
        ("about 38.5 s", "40", 0.9625, 0.0),
        ("50", 40, 0.75, 0.0),
        ("-40", 40, 0.0, 0.0),
        ("<answer>1,000</answer> or 3", 1000, 1.0, 1.0),
        ("0", 0, 1.0, 1.0),
        ("1", 0, 0.0, 0.0),
        ("none", 40, 0.0, 0.0),
    ],
)
def test_relative_errors(response, truth, score, accuracy):
    found = relative_error(response, truth)
    assert (found["reward"], found["accuracy"]) == (pytest.approx(score), accuracy)


def test_the_tolerance_of_the_accuracy():
    assert [relative_error("38", 40, tolerance=each)["accuracy"] for each in (0.04, 0.05)] == [0.0, 1.0]


@pytest.mark.parametrize("function", [ocr, rouge_l, relative_error, counting, grounding])
def test_an_empty_ground_truth_is_an_error(function):
    with raises(DataError, "ground_truth", found="''"):
        function("a", "")


@pytest.mark.parametrize(
    "unit", first(2, ["[{", "[", "{", '[{"bbox_2d":', "[]", "1 ", "a ", "1", "[.1", "[1,1,1"], others=pytest.mark.slow)
)
def test_a_long_response_is_read_at_once(unit):
    start = time.process_time()
    detection(unit * (100_000 // len(unit)), ONE)
    ocr(unit * (100_000 // len(unit)), "a short sign", unit="character")
    grounding(unit * (100_000 // len(unit)), [0, 0, 1, 1])
    assert time.process_time() - start < 2.0
