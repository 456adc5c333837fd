# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from tests.raising import raises
from whet.data.load import within_window
from whet.errors import DataError
from whet.types import Prompt


def prompts(*difficulties: Any) -> list[Prompt]:
    return [
        Prompt(
            uid=f"0:{index}",
            index=index,
            messages=(),
            token_ids=(1,),
            data_source="s",
            ground_truth="",
            extra_info={} if value is None else {"pass_rate": value},
        )
        for index, value in enumerate(difficulties)
    ]


def test_what_is_always_or_never_solved_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        kept = within_window(prompts(0, 0.25, 0.5, 1.0, 0.8), "pass_rate", 0.0, 0.8)
    assert [prompt.index for prompt in kept] == [1, 2]
    assert [record.args for record in caplog.records] == [(3, 5, 0, "pass_rate", 0.8)]


@pytest.mark.parametrize(("value", "found"), [(None, "None"), ("hard", "'hard'"), (True, "True"), (float("nan"), "")])
def test_a_row_without_the_number_is_named(value: Any, found: str) -> None:
    key = "row 1: data.difficulty_key=pass_rate" if found else "data.difficulty_window"
    with raises(DataError, key, found=re.compile(found)):
        within_window([*prompts(0.5, value)] if found else prompts(value), "pass_rate", 0.0, 1.0)


def test_nothing_left_is_an_error() -> None:
    with raises(DataError, key="data.difficulty_window", found=re.compile("2 .* 0.1 < pass_rate < 0.2")):
        within_window(prompts(0.5, 0.6), "pass_rate", 0.1, 0.2)
