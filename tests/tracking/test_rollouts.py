# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises
from whet.errors import DataError
from whet.tracking.rollouts import beside, find_rollouts, read_rollouts, reasons, selected

ROWS: list[dict[str, Any]] = [
    {"uid": "a", "prompt": "1+1=", "reward": 1.0, "tokens": 3, "parts": {"format": 1.0}, "failure": None},
    {"uid": "b", "prompt": "2+2=", "reward": 0.0, "tokens": 12, "parts": {}, "failure": None, "response": "fünf, 5"},
    {"uid": "c", "prompt": "2+2=", "reward": None, "tokens": 7, "parts": {}, "failure": {"source": "tool"}},
]


def uids(conditions: list[str], sort: str | None = None) -> str:
    return "".join(row["uid"] for row in selected(ROWS, conditions, sort))


@pytest.mark.parametrize(
    ("conditions", "found"),
    [
        ([], "abc"),
        (["reward<1"], "b"),
        (["reward != 1"], "bc"),  # a missing value is not 1
        (["length>=7"], "bc"),
        (["tokens=3.0"], "a"),
        (["prompt=2+2="], "bc"),
        (["response~fünf"], "b"),
        (["response~, 5", "reward=0"], "b"),
        (["failure"], "c"),
        (["!failure"], "ab"),
        (["reward"], "ab"),  # 0.0 is a reward
        (["!reward"], "c"),
        (["failure~tool"], "c"),
        (["failure.source=tool"], "c"),
        (["parts.format=1"], "a"),
        (["reward=none"], ""),
    ],
)
def test_where(conditions: list[str], found: str) -> None:
    assert uids(conditions) == found


def test_sorted_rows_have_those_without_the_field_last() -> None:
    assert uids([], "length") == "acb" and uids([], "-tokens") == "bca"
    assert uids([], "reward") == "bac" and uids([], "-reward") == "abc"
    assert uids([], "prompt") == "abc"


@pytest.mark.parametrize(
    ("conditions", "sort", "fields"),
    [
        (["rewrd<1"], None, {"found": "rewrd", "change": re.compile(r"\breward\b")}),
        ([], "-lenght", {"found": "lenght", "change": re.compile(r"\blength\b")}),
        (["xyz"], None, {"found": "xyz", "expected": re.compile("uid, prompt, reward")}),
        (["tokens<many"], None, {"key": "--where tokens<many", "found": re.compile("^tokens .*'many'")}),
    ],
)
def test_mistakes_name_the_nearest_field(conditions: list[str], sort: str | None, fields: dict[str, Any]) -> None:
    with raises(DataError, **{"key": "field of a trajectory", **fields}):
        selected(ROWS, conditions, sort)


def test_rows_of_the_same_prompt_stand_beside_each_other() -> None:
    left = [{"prompt": "x", "n": 1}, {"prompt": "x", "n": 2}, {"prompt": "x", "n": 3}, {"prompt": "y", "n": 4}]
    right = [{"prompt": "z", "n": 5}, {"prompt": "x", "n": 6}, {"prompt": "x", "n": 7}]
    assert [(a["n"], b["n"]) for a, b in beside(left, right, "a", "b")] == [(1, 6), (2, 7)]
    with raises(DataError, "a and b", change=re.compile("--validation")):
        beside(left[3:], right, "a", "b")


def test_the_same_row_and_number_stand_beside_each_other_before_others_of_the_prompt() -> None:
    left = [{"prompt": "x", "uid": uid} for uid in ("1:4:2", "1:4:0", "1:4:1", "1:9:0")]
    right = [{"prompt": "x", "uid": uid} for uid in ("0:9:0", "0:4:0", "0:4:2", "0:7:0")]
    pairs = [(a["uid"], b["uid"]) for a, b in beside(left, right, "a", "b")]
    assert pairs == [("1:4:2", "0:4:2"), ("1:4:0", "0:4:0"), ("1:4:1", "0:7:0"), ("1:9:0", "0:9:0")]


def test_the_same_pictures_stand_beside_each_other() -> None:
    def row(uid: str, *digests: str, turns: int = 1) -> dict[str, Any]:
        return {"prompt": "?", "uid": uid, "turns": turns, "media": [{"digest": digest} for digest in digests]}

    left, right = [row("0:0:0", "aa"), row("0:1:0", "bb")], [row("0:0:0", "bb"), row("0:1:0", "cc")]
    assert beside(left, right, "a", "b") == [(left[1], right[0])]
    one, other = row("0:0:0", "aa", "bb", turns=2), row("0:0:0", "aa", "cc", turns=2)  # each saw what it did
    assert beside([one], [other], "a", "b") == [(one, other)]


def test_the_file_of_a_step_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    with raises(DataError, str(folder), found=re.compile(r"step_\*.jsonl or validation_\*.jsonl")):
        find_rollouts(tmp_path)
    folder.mkdir()
    for name in ("step_000002", "step_000004", "validation_000000", "validation_000004", "jumps_000004"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"uid": name}) + "\n" + '{"torn')
    assert find_rollouts(tmp_path).stem == "step_000004"
    assert find_rollouts(tmp_path, 0).stem == "validation_000000"
    assert find_rollouts(tmp_path, 4, kind="validation").stem == "validation_000004"
    assert read_rollouts(folder / "step_000002.jsonl") == [{"uid": "step_000002"}]
    assert find_rollouts(folder / "step_000002.jsonl").stem == "step_000002"
    with raises(DataError, str(folder), found=re.compile(r"\b3$"), expected=re.compile("2, 4, 0$")):
        find_rollouts(tmp_path, 3)
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "answers.jsonl").write_text("[]\n")
    with raises(DataError, f"{tmp_path}/eval/answers.jsonl, line 1", found="'[]'"):
        read_rollouts(find_rollouts(tmp_path / "eval"))
    (tmp_path / "eval" / "answers.jsonl").write_text("")
    with raises(DataError, f"{tmp_path}/eval/answers.jsonl", found="no trajectories"):
        read_rollouts(find_rollouts(tmp_path / "eval"))


def test_why_a_trajectory_has_its_reward() -> None:
    failure = {"source": "tool", "message": "no answer", "timed_out": True}
    assert reasons({"failure": failure, "ground_truth": "4"}) == ["failed in tool (deadline): no answer"]
    assert reasons({"finish_reason": "length", "extracted": "5", "ground_truth": "4", "limit": "max_turns"}) == [
        "cut off: data.max_response_length",
        "limit: max_turns",
        "read '5', expected '4'",
    ]
    assert reasons({"finish_reason": "stop", "extracted": None, "ground_truth": None}) == []
    assert reasons({"dropped_by": "all_equal"}) == ["dropped by all_equal"]
    assert reasons({"finish_reason": "abort"}) == ["ended by abort"]


def test_a_pipe_and_a_folder_are_no_rollouts_and_a_deep_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/step_000001.jsonl").write_bytes(b'{"uid": "\xff"}\n')
    os.mkfifo(tmp_path / "rollouts/step_000002.jsonl")
    (tmp_path / "rollouts/step_000003.jsonl").mkdir()
    assert read_rollouts(find_rollouts(tmp_path)) == [{"uid": "\ufffd"}]
    (tmp_path / "rollouts/step_000004.jsonl").write_text("{}\n" + "[" * 100_000 + "\n")
    with raises(DataError, re.compile(r"000004\.jsonl, line 2$")):
        read_rollouts(find_rollouts(tmp_path))
