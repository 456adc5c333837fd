# SPDX-License-Identifier: Apache-2.0
"""Two models on the same prompts: numbers by hand, differences beyond chance, and invalid comparisons."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.raising import raises
from whet.errors import DataError
from whet.evaluation.answers import Record
from whet.evaluation.estimators import compare


def answer(index: int, accuracy: float | None, **changes: Any) -> Record:
    return {
        "uid": f"0:{index}:0",
        "index": index,
        "data_source": "a",
        "prompt": f"What is {index} + {index}?",
        "ground_truth": str(2 * index),
        "reward": accuracy,
        "accuracy": accuracy,
        "parts": {"format": 1.0},
        "failure": {"source": "reward", "message": "late"} if accuracy is None else None,
        **changes,
    }


def model(*right: float, answers: int = 1) -> list[Record]:
    return [answer(index, value) for index, value in enumerate(right) for _ in range(answers)]


def test_two_models_by_hand() -> None:
    a, b = model(1, 0, 0, 0, 1), model(0, 1, 1, 1, 1)
    found = compare(a, b)["all"]
    assert (found.num_prompts, found.n) == (5, (1, 1))
    assert (found.a.value, found.b.value, found.difference.value) == (0.4, 0.8, 0.4)
    assert (found.a_better, found.b_better) == (1, 3)  # McNemar's counts
    assert found.p_value == 10 / 16  # of 4 prompts that differ: P(|sum of signs| >= 2)
    assert not found.is_real
    s = np.std([-1, 1, 1, 1, 0], ddof=1)
    assert found.prompts_needed == int(np.ceil((2.8016 * s / 0.4) ** 2))
    low, high = 100 * found.difference.low, 100 * found.difference.high
    assert found.verdict() == (
        f"B is 40.0 points better (95 % interval {low:.1f} to {high:.1f}, p = 0.62): that cannot be told from chance "
        f"with 5 prompts; about {found.prompts_needed} would be needed to see such a difference"
    )


def test_a_gain_and_a_loss_that_are_real() -> None:
    a, b = model(*[0.0] * 60, *[1.0] * 40), model(*[0.0] * 40, *[1.0] * 60)
    gain, loss = compare(a, b)["all"], compare(b, a)["all"]
    assert gain.is_real and loss.is_real
    assert gain.difference.value == pytest.approx(0.2) and gain.p_value < 1e-3
    # the deviation of 20 ones among 100, over sqrt(100)
    assert gain.difference.low == pytest.approx(0.2 - 1.96 * 0.04, abs=0.02)
    assert gain.verdict().startswith("B is 20.0 points better") and gain.verdict().endswith(": the gain is real")
    assert loss.verdict().startswith("B is 20.0 points worse") and loss.verdict().endswith(": the loss is real")


def test_pairing_sees_what_two_intervals_apart_do_not() -> None:
    rng = np.random.default_rng(0)
    hardness = rng.random(200)
    a = model(*(hardness < 0.5).astype(float))
    b = model(*(hardness < 0.56).astype(float))
    found = compare(a, b)["all"]
    assert found.a.high > found.b.low  # the intervals overlap
    assert found.is_real and found.a_better == 0


def test_equal_models() -> None:
    found = compare(model(1, 0, 1), model(1, 0, 1))["all"]
    low, high = 100 * found.difference.low, 100 * found.difference.high
    assert high - low > 100
    assert found.verdict() == (
        "A and B score the same, but 3 prompts are too few to tell them apart: the 95 % interval of their difference "
        f"is {low:.1f} to {high:.1f} points"
    )
    assert found.p_value == 1.0 and not found.is_real and found.prompts_needed is None
    assert found.difference.low < 0 < found.difference.high


def test_models_are_called_equal_only_where_the_interval_is_narrow() -> None:
    equal = model(*[0.0, 1.0] * 400)
    assert compare(equal, equal)["all"].verdict().startswith("A and B are equally good on these 800 prompts: the 95 %")
    swapped = model(*[1.0, 0.0] * 400)  # as good, and another one on every prompt
    assert compare(equal, swapped)["all"].verdict().startswith("A and B score the same, but 800 prompts are too")


def test_answers_to_one_prompt_are_one_observation() -> None:
    """Eight equal answers to each of six prompts say no more than one each."""
    one, eight = (compare(model(*[0.0] * 6, answers=n), model(*[1.0] * 6, answers=n))["all"] for n in (1, 8))
    assert eight.n == (8, 8)
    assert (eight.p_value, eight.difference) == (one.p_value, one.difference) == (2 / 64, one.difference)
    mixed = compare(model(0, 1), model(1, 1, answers=4))["all"]
    assert mixed.n == (1, 4) and mixed.difference.value == 0.5


def test_a_failed_answer_scores_nothing() -> None:
    found = compare(model(1, 1), [answer(0, None), answer(1, 1.0)])["all"]
    assert found.b.value == 0.5


def test_sources_and_other_metrics() -> None:
    a = [answer(0, 1, reward=0.1), answer(1, 0, data_source="b", ground_truth="x", parts={"format": 0.5})]
    b = [answer(0, 1, reward=0.7), answer(1, 1, data_source="b", ground_truth="x", parts={"format": 1.0})]
    found = compare(a, b)
    assert list(found) == ["all", "a", "b"]
    assert (found["a"].difference.value, found["b"].difference.value, found["all"].difference.value) == (0, 1, 0.5)
    rewards = compare(a, b, metric="reward")["a"]
    assert rewards.difference.value == pytest.approx(0.6) and rewards.verdict().startswith("B is 0.6 reward better")
    assert compare(a, b, metric="format")["all"].difference.value == 0.25
    with raises(DataError, "response 0:0:0", found=re.compile("'style'"), expected=re.compile("accuracy, format")):
        compare(a, b, metric="style")


def test_other_prompts_are_refused_by_name() -> None:
    for a, b, found in (
        (model(1, 1, 1), model(1, 1, 1, 1, 1), r"^3 and 5; A \w+ 2 .*\(rows 3, 4 "),
        (model(*[1] * 9), model(1), r"^9 and 1; B \w+ 8 .*\(rows 1, 2, 3, 4, 5, \.\.\. "),
    ):
        with raises(DataError, re.compile("^prompts of A"), found=re.compile(found)):
            compare(a, b)
    with raises(DataError, re.compile("^row 1 .*: ground_truth$"), found=re.compile("^'2' in A .*'3' in B$")):
        compare(model(1, 1), [answer(0, 1), answer(1, 1, ground_truth="3")])
    asked = [answer(0, 1), answer(1, 1, prompt="What is 1 + 1? Think.")]
    found = re.compile(r"^'What is 1 \+ 1\?' in A .*'What is 1 \+ 1\? Think\.' in B$")
    with raises(DataError, re.compile("^row 1 .*: prompt$"), found=found, change=re.compile("--other-prompts")):
        compare(model(1, 1), asked)
    assert compare(model(1, 1), asked, other_prompts=True)["all"].num_prompts == 2
    long = [answer(0, 1, prompt="x" * 500 + "A" + "y" * 500)], [answer(0, 1, prompt="x" * 500 + "B" + "y" * 500)]
    with raises(DataError, found=re.compile(r"'\.\.\.x{20}Ay{39}\.\.\.' in A .*'\.\.\.x{20}By{39}\.\.\.' in B")):
        compare(*long)
