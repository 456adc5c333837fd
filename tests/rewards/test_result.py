# SPDX-License-Identifier: Apache-2.0
import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.raising import raises
from whet.errors import RewardError
from whet.rewards.result import RESULT, read_result, split_rows
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
        (None, f"{RESULT}: None (NoneType)"),
        ("1.0", f"{RESULT}: '1.0' (str)"),
        (math.nan, f"{RESULT}=nan"),
        (math.inf, f"{RESULT}=inf"),
        (torch.tensor(-math.inf), f"{RESULT}=-inf"),
        (1j, f"{RESULT}: 1j (complex)"),
        (10**400, f"{RESULT}: 100000"),
        ({}, RESULT),
        ({"correct": 1.0}, rf"{RESULT}: .*\bcorrect; .*reward, score, overall"),
        ({"reward": None, "score": 1.0}, "reward: None (NoneType)"),
        ({"reward": math.nan}, "reward=nan"),
        ({"reward": 1.0, "accuracy": None}, "accuracy: None (NoneType)"),
        ({"reward": 1.0, "acc": "yes"}, "acc: 'yes' (str)"),
        ({"reward": 1.0, "style": math.inf}, "style=inf"),
        ((1.0, {"extra": 2.0}), f"{RESULT}, token 1: {{'extra': 2.0}} (dict)"),
        (torch.ones(2), f"{RESULT}: 2 "),
        (b"1", f"{RESULT}: b'1' (bytes)"),
    ],
)
def test_what_cannot_be_read_is_a_failure_that_says_so(raw, said):
    outcome = read(raw)
    assert isinstance(outcome, Failure) and outcome.source == "reward"
    assert (outcome.message.startswith(said) or re.match(said, outcome.message)) and outcome.key


@pytest.mark.parametrize("row", [[0.25, 0.0, 0.5, 0.0, 0.0], torch.tensor([0.25, 0.0, 0.5]), (0.25, 0, 0.5, 0)])
def test_rewards_by_token_are_kept_and_summed_and_padding_is_dropped(row):
    assert read(row, threshold=0.75) == RewardResult(0.75, 1.0, {}, (0.25, 0.0, 0.5))
    assert read({"reward": row, "acc": 0}) == RewardResult(0.75, 0.0, {}, (0.25, 0.0, 0.5))


def test_a_reward_paid_in_the_padding_is_a_failure_that_says_where_it_belongs():
    outcome = read([0.0, 0.0, 0.0, 0.0, 1.0])
    assert isinstance(outcome, Failure)
    assert "token 4=1" in outcome.message and "token 2" in outcome.message


def test_a_nan_at_one_token_is_a_failure():
    assert "token 1=nan" in read([0.0, math.nan, 1.0]).message


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
    ("raw", "key", "found"),
    [
        ([1.0], RESULT, r"^1 .*\b2\b"),
        (torch.ones(3), RESULT, r"^3 .*\b2\b"),
        ({"reward": [1.0, 2.0], "acc": [1.0]}, "acc", r"^1 .*\b2\b"),
        ({"reward": 1.0}, "reward", r"\b2\b"),
        (1.0, RESULT, r"^1.0 \(float\).*\b2\b"),
        (None, RESULT, r"^None \(NoneType\)"),
        ("ab", RESULT, r"^'ab' \(str\)"),
        (torch.tensor(1.0), RESULT, r"^tensor.*\b2\b"),
    ],
)
def test_another_number_of_results_is_an_error(raw, key, found):
    with raises(RewardError, key, found=re.compile(found)):
        split_rows(raw, 2)
