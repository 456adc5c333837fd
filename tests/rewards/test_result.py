# SPDX-License-Identifier: Apache-2.0
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from whet.errors import RewardError
from whet.rewards.result import read_result, split_rows
from whet.types import Failure, RewardResult


def read(raw, threshold=1.0, tokens=3):
    return read_result(raw, correct_threshold=threshold, num_response_tokens=tokens)


@pytest.mark.parametrize(
    "raw",
    [
        0.5,
        Fraction(1, 2),
        Decimal("0.5"),
        np.float32(0.5),
        np.array(0.5),
        torch.tensor(0.5),
        torch.tensor(0.5, dtype=torch.bfloat16),
        {"reward": torch.tensor(0.5)},
    ],
)
def test_a_number_of_any_library_is_a_reward(raw):
    assert read(raw) == RewardResult(0.5, 0.0, {})


@pytest.mark.parametrize(("raw", "reward"), [(True, 1.0), (False, 0.0), (np.True_, 1.0), (3, 3.0), (np.int64(2), 2.0)])
def test_booleans_and_integers_are_numbers(raw, reward):
    assert read(raw) == RewardResult(reward, float(reward >= 1), {})


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"reward": 0.2, "score": 0.3, "overall": 0.4}, RewardResult(0.2, 0.0, {"score": 0.3, "overall": 0.4})),
        ({"score": 0.3, "overall": 0.4}, RewardResult(0.3, 0.0, {"overall": 0.4})),
        ({"overall": 0.4, "format": 1, "accuracy": 0}, RewardResult(0.4, 0.0, {"format": 1.0})),
        ({"reward": -1, "accuracy": 1, "acc": 0}, RewardResult(-1.0, 1.0, {"acc": 0.0})),
        ({"score": -1.0, "acc": True, "pred": "7"}, RewardResult(-1.0, 1.0, {}, extracted="7")),
        ({"score": -1.0, "pred": 7}, RewardResult(-1.0, 0.0, {}, extracted="7")),
        ({"score": -1.0, "pred": None}, RewardResult(-1.0, 0.0, {})),
        ({"score": 1.0, "note": None, "list": [1.0], "words": "3"}, RewardResult(1.0, 1.0, {})),
        ({"reward": torch.tensor(2.0), "length": np.int64(7)}, RewardResult(2.0, 1.0, {"length": 7.0})),
    ],
)
def test_which_number_of_a_dict_is_what(raw, expected):
    assert read(raw) == expected


# The last two are 0.7999999999999999, a sum of parts, and a number that is less.
@pytest.mark.parametrize(
    ("reward", "accuracy"), [(0.79, 0.0), (0.8, 1.0), (0.9, 1.0), (0.5 + 0.2 + 0.1, 1.0), (0.7999, 0.0)]
)
def test_the_accuracy_is_the_threshold_where_none_is_given(reward, accuracy):
    assert read(reward, threshold=0.8).accuracy == accuracy
    assert read({"score": reward}, threshold=0.8).accuracy == accuracy


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (None, "the result is None (NoneType)"),
        ("1.0", "the result is '1.0' (str)"),
        (math.nan, "the result is nan"),
        (math.inf, "the result is inf"),
        (torch.tensor(-math.inf), "the result is -inf"),
        (1j, "the result is 1j (complex)"),
        (10**400, "(int)"),
        ({}, "none of reward, score, overall; its keys are none"),
        ({"correct": 1.0}, "its keys are correct"),
        ({"reward": None, "score": 1.0}, "'reward' is None"),
        ({"reward": math.nan}, "'reward' is nan"),
        ({"reward": 1.0, "accuracy": None}, "'accuracy' is None"),
        ({"reward": 1.0, "acc": "yes"}, "'acc' is 'yes'"),
        ({"reward": 1.0, "style": math.inf}, "'style' is inf"),
        ((1.0, {"extra": 2.0}), "the result at token 1 is"),
        (torch.ones(2), "has 2 numbers"),
        (b"1", "(bytes)"),
    ],
)
def test_what_cannot_be_read_is_a_failure_that_says_so(raw, said):
    outcome = read(raw)
    assert isinstance(outcome, Failure) and outcome.source == "reward"
    assert said in outcome.message


@pytest.mark.parametrize("row", [[0.25, 0.0, 0.5, 0.0, 0.0], torch.tensor([0.25, 0.0, 0.5]), (0.25, 0, 0.5, 0)])
def test_rewards_by_token_are_kept_and_summed_and_padding_is_dropped(row):
    assert read(row, threshold=0.75) == RewardResult(0.75, 1.0, {}, (0.25, 0.0, 0.5))
    assert read({"reward": row, "acc": 0}) == RewardResult(0.75, 0.0, {}, (0.25, 0.0, 0.5))


def test_a_reward_paid_in_the_padding_is_a_failure_that_says_where_it_belongs():
    outcome = read([0.0, 0.0, 0.0, 0.0, 1.0])
    assert isinstance(outcome, Failure)
    assert "has 1 at token 4" in outcome.message and "belongs to token 2" in outcome.message


def test_a_nan_at_one_token_is_a_failure():
    assert "at token 1 is nan" in read([0.0, math.nan, 1.0]).message


def test_rows_come_from_sequences_tensors_and_columns():
    assert split_rows([1.0, {"score": 2}], 2) == [1.0, {"score": 2}]
    assert split_rows(torch.tensor([1.0, 2.0]), 2) == [1.0, 2.0]
    assert split_rows(np.array([[1.0, 0.0], [0.0, 2.0]]), 2) == [[1.0, 0.0], [0.0, 2.0]]
    columns = {"reward": torch.tensor([1.0, 2.0]), "acc": [True, False], "temperature": 0.5, "pred": ["a", "b"]}
    assert split_rows(columns, 2) == [
        {"reward": 1.0, "acc": True, "temperature": 0.5, "pred": "a"},
        {"reward": 2.0, "acc": False, "temperature": 0.5, "pred": "b"},
    ]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ([1.0], "1 entries for 2 responses"),
        (torch.ones(3), "3 entries for 2 responses"),
        ({"reward": [1.0, 2.0], "acc": [1.0]}, "'acc' has 1 entries"),
        ({"reward": 1.0}, "'reward' is one number for 2 responses"),
        (1.0, "returned 1.0 (float)"),
        (None, "returned None"),
        ("ab", "returned 'ab'"),
        (torch.tensor(1.0), "for 2 responses"),
    ],
)
def test_another_number_of_results_is_an_error(raw, said):
    with pytest.raises(RewardError) as caught:
        split_rows(raw, 2)
    assert said in str(caught.value)
