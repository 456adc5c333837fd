# SPDX-License-Identifier: Apache-2.0
"""Each error of a reward names the item, the value found, the expected value, and the change.

The texts of most of them are held by tests/test_bad_input.py or beside the functions; here it is the four parts."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.judge_server import Reply, judging
from whet.config.schema import RewardConfig
from whet.domains import Domains
from whet.errors import WhetError
from whet.plugins.scores.judge.rubrics import load_rubric
from whet.programs.protocol import open_sandbox
from whet.rewards.pool import build_scorer
from whet.rollout.reports import FailureWatch
from whet.types import Failure, Group, Prompt, RewardItem, Trajectory

RUST = "```rust\nfn main() {}\n```"
PLAIN = {"sandbox": "unisolated"}
LOST = {**PLAIN, "languages": {"rust": {"file": "a.rs", "run": ["no-such-rustc", "a.rs"]}}}
STDIN = {"inputs": ["1"], "outputs": ["1"]}


def scored(function: str, truth: Any, response: str = "text", **kwargs: Any) -> Callable[[], str]:
    """Makes the failure of a row."""

    def say() -> str:
        given = {"function": function, "num_workers": 0, "kwargs": kwargs}
        [outcome] = (
            build_scorer(RewardConfig.model_validate(given))
            .submit_batch([RewardItem("openai/gsm9k", response, truth)])
            .result()
        )
        assert isinstance(outcome, Failure)
        return outcome.message

    return say


def raised(call: Callable[[], object]) -> Callable[[], str]:
    def say() -> str:
        with pytest.raises(WhetError) as found:
            call()
        return str(found.value)

    return say


def prompts(*rows: tuple[str, dict[str, Any]]) -> list[Prompt]:
    return [Prompt(f"0:{i}", i, (), (1,), source, "1", extra_info=extra) for i, (source, extra) in enumerate(rows)]


def missing_from(said: str, parts: tuple[str, ...]) -> list[str]:
    return [part for part in parts if part not in said]


DOMAINS = Domains({"sums": ["additions", "openai/*"], "words": ["words"]})


def rubric(text: str) -> Callable[[], object]:
    def load() -> object:
        Path("mine.yaml").write_text(text)
        return load_rubric("mine.yaml")

    return load


def unauthorised() -> str:
    with judging([Reply(status=401)]) as judge:
        return scored("llm_judge", "1", endpoint=judge.address, model="m")().replace(judge.address, "ADDRESS")


NOWHERE = "http://127.0.0.1:9/v1"
# Situation, the call that gives the message, then its facts: the item, the value found, valid values, the key.
TABLE: list[tuple[str, Callable[[], str], tuple[str, ...]]] = [
    (
        "unknown domain",
        raised(lambda: DOMAINS.assign(prompts(("additions", {}), ("words", {"domain": "word"})))),
        ("row 1: domain (data source 'words'): word", "expected one of sums, words", "correct its field 'domain'"),
    ),
    (
        "data source of no domain",
        raised(lambda: DOMAINS.assign(prompts(("poems", {})))),
        ("row 0: data source: poems", "sums: additions, openai/*; words"),
    ),
    (
        "domain without rows",
        raised(lambda: DOMAINS.check_used(DOMAINS.assign(prompts(("additions", {}), ("openai/x", {}))))),
        (
            "reward.domains.words",
            "sums (2)",
            "domain=words",
            "(~reward.domains.words)",
        ),
    ),
    (
        "unknown data source",
        scored("auto", "1"),
        ("data_source", "openai/gsm9k", "'openai/gsm8k'", "reward.function"),
    ),
    (
        "tests without a field",
        scored("code", {"input": ["1"]}, **PLAIN),
        ("ground_truth", "input;", "inputs", "outputs", "assert_case", "row"),
    ),
    (
        "tests of unequal number",
        scored("code", {"inputs": ["1"], "outputs": []}, **PLAIN),
        ("ground_truth", "1 inputs", "0 outputs", "row"),
    ),
    (
        "no ground truth",
        scored("code", None, **PLAIN),
        ("ground_truth", "is not set", "dict", "list", "data.answer_key"),
    ),
    (
        "test case that is no JSON",
        scored("code", '{"inputs": ["1"], ', **PLAIN),
        ("ground_truth", """'{"inputs": ["1"], '""", "JSON", "Python", "docs/rewards.md", "row"),
    ),
    (
        "instructions without a field",
        scored("ifeval", {"instruction_id_list": ["punctuation:no_comma"]}),
        ("ground_truth", "{'instruction_id_list'", "JSON", "kwargs", "extra_info"),
    ),
    (
        "search without an answer",
        scored("search_qa", None),
        ("ground_truth", "is not set", "list of texts", "at least one"),
    ),
    (
        "letter that is none",
        scored("multiple_choice", "the first"),
        ("ground_truth", "'the first'", "B, (B)", "letter"),
    ),
    (
        "language without a toolchain",
        scored("code", STDIN, RUST, **LOST),
        ("language rust", "no-such-rustc", "/usr/bin", "install it"),
    ),
    (
        "language that is not in the sandbox",
        raised(scored("code", STDIN, RUST, language="rust", **PLAIN)),
        ("language", "rust", "python, cpp", "in languages"),
    ),
    (
        "sandbox service that is not there",
        scored("code", STDIN, "```python\nprint(1)\n```", sandbox="http://127.0.0.1:9"),
        ("http://127.0.0.1:9", "SandboxFusion", "whet serve-sandbox"),
    ),
    (
        "unknown sandbox",
        raised(scored("code", STDIN, sandbox="bubblewarp")),
        ("bubblewarp", "bubblewrap", "http://HOST:PORT", "unisolated"),
    ),
    (
        "endpoint that is not there",
        scored("llm_judge", "1", endpoint=NOWHERE, model="m", retries=0),
        (f"judge 'm' at {NOWHERE}", "ConnectError", "OpenAI", "endpoint"),
    ),
    (
        "endpoint that is no address",
        raised(scored("llm_judge", "1", endpoint="localhost", model="m")),
        ("endpoint", "localhost", ":8000/v1"),
    ),
    (
        "endpoint that refuses the key",
        unauthorised,
        ("judge at ADDRESS", "401", "OPENAI_API_KEY", "key_variable"),
    ),
    (
        "rubric without its parser's field",
        raised(rubric("{template: 'Good? {{ response }}', parser: scale}")),
        ("rubric mine: template", "'Score:'", "parser=scale", "add it"),
    ),
    (
        "rubric without a parser",
        raised(rubric("{template: 'Good? {{ response }}'}")),
        ("rubric mine.yaml: parser", "is not set", "template", "add it"),
    ),
    (
        "unknown rubric",
        raised(lambda: load_rubric("yes")),
        ("rubric", "yes", "yes_no, scale", ".yaml", ".json", "'yes_no'"),
    ),
]


@pytest.mark.parametrize(("say", "parts"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_an_error_has_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Callable[[], str], parts: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    said = say()
    assert missing_from(said, parts) == [], said


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    open_sandbox.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    said = raised(scored("code", STDIN, sandbox="bubblewrap"))()
    assert missing_from(said, ("sandbox=bubblewrap", "bwrap", "PATH", "install bubblewrap")) == [], said


def test_the_warning_of_a_failure_names_its_trajectory(caplog: pytest.LogCaptureFixture) -> None:
    [prompt] = prompts(("additions", {}))
    failed = Trajectory("0:0:1", prompt, (), 1, failure=Failure("reward", "why"))
    with caplog.at_level(logging.WARNING):
        FailureWatch().record([Group(prompt, (Trajectory("0:0:0", prompt, (), 0), failed))])
    [record] = caplog.records
    assert {"reward", "why", "0:0:1"} <= set(map(str, record.args or ()))
