# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any

import pytest

from tests.raising import raises
from whet.data.load import matching
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
    with raises(DataError, key="data.filter.levle", change=re.compile(r"\blevel\b")):
        matching(ROWS, {"levle": 1})
    both = re.compile("extra_info.year or extra_info[?]")
    with raises(DataError, key="data.filter.extra_info.yaer", change=both):
        matching(ROWS, {"extra_info.yaer": 1})
    with raises(DataError, key="data.filter.z", change=re.compile("checked, extra_info, extra_info.year, ")):
        matching(ROWS, {"z": 1})
    found, values = re.compile(" 4 .*subject = 'art'"), re.compile("'algebra', 'geometry'")
    with raises(DataError, key="data.filter.subject", found=found, expected=values):
        matching(ROWS, {"subject": "art"})
    found, values = re.compile(r" 2 .*level .*\{'min': 4\}"), re.compile("1, 3.5")
    with raises(DataError, key="data.filter.level", found=found, expected=values):
        matching(ROWS, {"subject": "algebra", "level": {"min": 4}})
    bounds = re.compile("data.filter.subject")
    with raises(DataError, key="row 0: field 'subject'", found=re.compile("'algebra'"), expected=bounds):
        matching(ROWS, {"subject": {"min": 1}})
    for condition in ({"least": 1}, {}, {"min": "1"}, {"not": 1, "min": 2}):
        with raises(ConfigError, key="data.filter.level", found=condition, expected=re.compile(r"\{min: number")):
            matching(ROWS, {"level": condition})
