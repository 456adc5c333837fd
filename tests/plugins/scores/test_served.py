# SPDX-License-Identifier: Apache-2.0
"""Scores of served reward models: the forms of servers, failures and deadlines, over real HTTP."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises
from whet import http
from whet.errors import RewardError
from whet.plugins.scores.served import compute_score, last_number
from whet.rewards.adapter import adapt
from whet.rewards.pool import RewardPool
from whet.types import Failure, Message, Outcome, RewardItem, RewardResult

sys.path.insert(0, str(Path(__file__).parents[2] / "rewards"))
from judge_server import Judge, Reply, judging


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT_SECONDS", 0.02)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def reply(data: Any, **more: Any) -> Reply:
    return Reply(raw=json.dumps(data).encode(), **more)


def score(judge: Judge, *items: RewardItem, **kwargs: Any) -> list[Outcome]:
    """The outcomes in this process."""
    given = {"endpoint": judge.address, "deadline_seconds": 5.0, **kwargs}
    function = adapt(compute_score, kwargs=given, correct_threshold=1.0)
    try:
        return function.score(items)
    finally:
        function.close()


ITEM = RewardItem("test", "4", None, prompt_str="2 + 2?")
CHAT = RewardItem(
    "test", "4", None, prompt_str="2 + 2?", messages=(Message("system", "Add."), Message("user", "2 + 2?"))
)
TALK = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("api", "path", "answer"),
    [
        ("pooling", "/pooling", {"data": [{"index": 0, "object": "pooling", "data": [1.5]}]}),
        ("pooling", "/pooling", {"data": [{"index": 0, "object": "pooling", "data": [[9.0], [3.0], [1.5]]}]}),
        ("classify", "/classify", {"data": [{"index": 0, "label": "LABEL_0", "probs": [1.5], "num_classes": 1}]}),
        ("score", "/v1/score", {"data": [{"index": 0, "object": "score", "score": 1.5}]}),
    ],
)
def test_each_form_of_a_server(api: str, path: str, answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    with judging([reply(answer)]) as judge:
        [found] = score(judge, ITEM, api=api, model="rm", key_variable="MY_KEY")
    assert isinstance(found, RewardResult) and found.reward == 1.5
    asked = (
        {"text_1": "2 + 2?", "text_2": "4"} if api == "score" else {"messages": TALK, "add_generation_prompt": False}
    )
    assert judge.bodies == [{"model": "rm", **asked, "use_activation": False}]
    assert judge.keys == ["Bearer secret"] and judge.paths == [path]


def test_a_template_here_makes_the_text(qwen25_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(qwen25_folder)
    talk = [{"role": "system", "content": "Add."}, *TALK]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    with judging([reply([{"embedding": [0.25], "meta_info": {}}]), reply({"data": [{"data": [0.5]}]})]) as judge:
        found = score(judge, CHAT, api="sglang", template=str(qwen25_folder))
        found += score(judge, CHAT, template=str(qwen25_folder))
    assert [each.reward for each in found if isinstance(each, RewardResult)] == [0.25, 0.5]
    assert judge.bodies == [{"text": text}, {"input": text, "add_special_tokens": False, "use_activation": False}]


def test_what_fails_is_a_failure_with_the_reason() -> None:
    """A server that is busy is asked again; one that refuses, or that has two labels, is not."""
    good = reply({"data": [{"data": [1.5]}]})
    with judging([Reply(status=503), good]) as judge:
        [found] = score(judge, ITEM)
    assert isinstance(found, RewardResult) and len(judge.bodies) == 2
    for bad, why in (
        (Reply(status=404), "status 404"),
        (reply({"data": [{"probs": [0.2, 0.8]}]}), "2 numbers"),
        (reply({"data": [{"data": [float("nan")]}]}), "no score"),
        (reply({"data": []}), "no score"),
        (Reply(raw=b"<html>"), "no score"),
    ):
        with judging([bad]) as judge:
            [lost] = score(judge, ITEM)
        assert isinstance(lost, Failure) and lost.source == "reward" and why in lost.message, why
        assert len(judge.bodies) == 1
    with judging([reply({}, seconds=3.0)]) as judge:
        start = time.monotonic()
        [late] = score(judge, ITEM, request_seconds=0.2, deadline_seconds=0.6)
        assert isinstance(late, Failure) and "0.6 s" in late.message and time.monotonic() - start < 2


def test_the_score_of_a_reply() -> None:
    assert last_number({"data": [{"score": 2}]}) == 2.0
    assert last_number({"embedding": [3.5]}) == 3.5
    with pytest.raises(TypeError):
        last_number({"data": [{"label": "a"}]})


def test_options_are_checked_at_the_start() -> None:
    with raises(RewardError, re.compile("endpoint$"), found="localhost"):
        RewardPool(
            "reward_server", num_workers=1, timeout_seconds=5, correct_threshold=1.0, kwargs={"endpoint": "localhost"}
        )
    kwargs = {"endpoint": "http://127.0.0.1:1", "api": "sglang"}
    with raises(RewardError, re.compile("template$"), expected=re.compile("chat template")):
        RewardPool("reward_server", num_workers=1, timeout_seconds=5, correct_threshold=1.0, kwargs=kwargs)
