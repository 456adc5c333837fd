# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from whet.data.row_filter import matching
from whet.errors import ConfigError, DataError

ROWS: list[dict[str, Any]] = [
    {"level": 1, "subject": "algebra", "extra_info": {"year": 2020}, "checked": True},
    {"level": 2, "subject": "geometry", "extra_info": {"year": 2021}, "checked": False},
    {"level": 3.5, "subject": "algebra", "extra_info": {"year": 2022}, "checked": 1},
    {"level": 5, "subject": None},
]


@pytest.mark.parametrize(
    ("where", "left"),
    [
        ({}, [0, 1, 2, 3]),
        ({"subject": "algebra"}, [0, 2]),
        ({"subject": ["algebra", "geometry"]}, [0, 1, 2]),
        ({"level": {"min": 2}}, [1, 2, 3]),
        ({"level": {"min": 2, "max": 3.5}}, [1, 2]),
        ({"level": [1, {"min": 5}]}, [0, 3]),
        ({"subject": {"not": "algebra"}}, [1, 3]),
        ({"subject": {"not": None}}, [0, 1, 2]),
        ({"subject": {"not": ["algebra", None]}}, [1]),
        ({"level": {"not": {"max": 2}}}, [2, 3]),
        ({"extra_info.year": {"max": 2021}}, [0, 1]),
        ({"level": {"min": 2}, "subject": "algebra"}, [2]),
        ({"checked": True}, [0]),
        ({"checked": 1}, [2]),
    ],
)
def test_rows_that_meet_every_condition_are_left(where: dict[str, Any], left: list[int]) -> None:
    assert matching(ROWS, where) == left


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(DataError, match=r"no row has a field 'levle'; did you mean level\?"):
        matching(ROWS, {"levle": 1})
    with pytest.raises(
        DataError, match=r"no row has a field 'extra_info.yaer'; did you mean extra_info.year or extra_info\?"
    ):
        matching(ROWS, {"extra_info.yaer": 1})
    with pytest.raises(DataError, match=r"no row has a field 'z'; rows have checked, extra_info, extra_info.year, "):
        matching(ROWS, {"z": 1})
    with pytest.raises(
        DataError, match=r"none of 4 rows has subject = 'art'; its most frequent values are 'algebra', 'geometry'"
    ):
        matching(ROWS, {"subject": "art"})
    with pytest.raises(
        DataError, match=r"none of 2 rows has level within \{'min': 4\}; its most frequent values are 1, 3.5"
    ):
        matching(ROWS, {"subject": "algebra", "level": {"min": 4}})
    with pytest.raises(DataError, match=r"row 0: data.filter.subject has bounds, and the field is 'algebra'"):
        matching(ROWS, {"subject": {"min": 1}})
    for condition in ({"least": 1}, {}, {"min": "1"}, {"not": 1, "min": 2}):
        with pytest.raises(
            ConfigError, match=r"data.filter.level=.*; expected a value, a list of values, \{min: number"
        ):
            matching(ROWS, {"level": condition})
