# SPDX-License-Identifier: Apache-2.0
"""Hints of a judge in a real run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises
from tests.rewards.judge_server import Reply, judging
from tests.trainers.test_teacher import CPO, MakeConfig, Rows, built, teaching
from whet.errors import ConfigError
from whet.trainers.teacher import hints_of

JUDGE = """
def complete(messages):
    content = messages[-1]["content"]
    if content.startswith("1"):
        raise OSError("no route to the judge")
    return f"about {content}"
"""


def test_a_judge_that_fails_gives_no_hint(
    train_config: MakeConfig, additions: Rows, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "judge.py"
    path.write_text(JUDGE)
    options = {"complete": f"{path}:complete"}
    run, groups, _ = built(train_config({**CPO, "teacher.hint": "judge", "teacher.hint_options": options}), additions)
    for group, hints in zip(groups, hints_of(run.sources(groups, 1), *teaching(run)), strict=True):
        asked = str(group.prompt.messages[-1].content)
        assert hints == [None if asked.startswith("1") else f"about {asked}"] * 4
    run.close()


def test_hints_of_an_endpoint(
    train_config: MakeConfig, additions: Rows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The client of llm_judge: a passing fault is tried again, a lasting one gives no hint."""
    monkeypatch.setenv("HINT_KEY", "secret")

    def hint(body: dict[str, Any]) -> Reply:
        content = body["messages"][-1]["content"]
        if content.startswith("1") or len(judge.bodies) == 2:
            return Reply(status=500)
        return Reply(f"about {content}")

    with judging(hint) as judge:
        options = {
            "endpoint": judge.address,
            "model": "m",
            "key_variable": "HINT_KEY",
            "cache": str(tmp_path / "hints"),
        }
        options |= {"instruction": "Be brief.", "timeout_seconds": 4.0}
        config = train_config({**CPO, "teacher.hint": "judge", "teacher.hint_options": options})
        run, groups, _ = built(config, additions)
        for group, hints in zip(groups, hints_of(run.sources(groups, 1), *teaching(run)), strict=True):
            asked = str(group.prompt.messages[-1].content)
            assert hints == [None if asked.startswith("1") else f"about {asked}"] * 4
        run.close()
    assert set(judge.keys) == {"Bearer secret"}
    assert {body["messages"][0]["content"] for body in judge.bodies} == {"Be brief."}


def test_a_judge_is_a_function_or_an_endpoint(train_config: MakeConfig) -> None:
    for options in ({}, {"endpoint": "http://a/v1"}, {"complete": "a:b", "endpoint": "http://a/v1", "model": "m"}):
        with raises(ConfigError, "teacher.hint_options", found=options):
            train_config({**CPO, "teacher.hint": "judge", "teacher.hint_options": options})


@pytest.mark.slow
def test_a_judge_that_hangs_is_waited_for_once(train_config: MakeConfig, additions: Rows) -> None:
    options = {"complete": f"{__file__}:hangs", "timeout_seconds": 0.5, "parallel": 1}
    run, groups, _ = built(train_config({**CPO, "teacher.hint": "judge", "teacher.hint_options": options}), additions)
    start = time.monotonic()
    assert {hint for group in hints_of(run.sources(groups, 1), *teaching(run)) for hint in group} == {None}
    assert time.monotonic() - start < 2.0  # not half a second for each of four prompts, and the two seconds it sleeps
    run.close()


def hangs(messages: list[dict[str, Any]]) -> str:
    time.sleep(2.0)
    return "late"
