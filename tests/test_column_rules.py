# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from tests.raising import raises
from whet.column_rules import equal, object_array, pick
from whet.errors import DataError

NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (True, 1, False),
        (NAN, float("nan"), True),
        ("a", "a", True),
        ([1, NAN], [1, float("nan")], True),
        ([1, 2], (1, 2), False),
        ([1, 2], [1], False),
        ({"a": [NAN]}, {"a": [float("nan")]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), True),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0]), False),
        (torch.tensor([1]), torch.tensor([1.0]), False),
        (torch.tensor([1, 1]), torch.tensor([1]), False),
        (torch.tensor(1), 1, False),
        (torch.zeros(0), torch.zeros(0), True),
        (np.array([1.0, NAN]), np.array([1.0, NAN]), True),
        (np.array(["a"]), np.array(["b"]), False),
        (np.array([[1]]), np.array([1]), False),
        (np.array([None, [NAN]], dtype=object), np.array([None, [float("nan")]], dtype=object), True),
        (np.array([1, 2], dtype=object), np.array([1, 3], dtype=object), False),
    ],
)
def test_equal(one: Any, other: Any, expected: bool) -> None:
    assert equal(one, other) is expected
    assert equal(other, one) is expected


def test_object_array_takes_no_value_apart() -> None:
    values = [[1, 2], (3, 4), {"a": 5}, np.arange(2), None, "text"]
    array = object_array("x", values)
    assert array.shape == (6,)
    assert all(entry is value for entry, value in zip(array, values, strict=True))
    assert object_array("x", array) is array
    assert object_array("x", []).shape == (0,)
    assert object_array("x", np.array([1, 2]))[0] == 1
    with raises(DataError, "object column 'x'", found="a dict"):
        object_array("x", {"a": 1})  # type: ignore[arg-type]


def test_pick_takes_any_iterable_of_names() -> None:
    columns = {"a": 1, "b": 2, "c": 3}
    assert pick(columns, (name for name in ("c", "a")), "column") == {"c": 3, "a": 1}
    assert pick(columns, "b", "column") == {"b": 2}
    assert pick(columns, None, "column") == columns
    with raises(DataError, "column", found=re.compile(r"\['x'\]$"), expected=re.compile(r"\['a', 'b', 'c'\]$")):
        pick(columns, (name for name in ("x", "a")), "column")
