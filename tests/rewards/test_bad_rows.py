# SPDX-License-Identifier: Apache-2.0
"""Each error of a reward says which item is wrong, what was found, what was expected, and what to change.

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
from whet.rewards.judge.rubrics import load_rubric
from whet.rewards.pool import build_scorer
from whet.rollout.reports import FailureWatch
from whet.sandbox.open import open_sandbox
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
# Situation, the call that gives the message, then its parts: the item, what was found, expected, and what to change.
TABLE: list[tuple[str, Callable[[], str], tuple[str, str, str, str]]] = [
    (
        "unknown domain",
        raised(lambda: DOMAINS.assign(prompts(("additions", {}), ("words", {"domain": "word"})))),
        ("row 1: domain (data source 'words'): word", "expected one of sums, words", "correct its field 'domain'"),
    ),
    (
        "data source of no domain",
        raised(lambda: DOMAINS.assign(prompts(("poems", {})))),
        ("row 0: data source: poems", "sums: additions, openai/*; words", "add the source to one"),
    ),
    (
        "domain without rows",
        raised(lambda: DOMAINS.check_used(DOMAINS.assign(prompts(("additions", {}), ("openai/x", {}))))),
        (
            "reward.domains.words",
            "additions (2)",
            "domain=words",
            "(~reward.domains.words)",
        ),
    ),
    (
        "unknown data source",
        scored("auto", "1"),
        ("data_source='openai/gsm9k'", "has no function of its own", "expected one of", "correct data_source"),
    ),
    (
        "tests without a field",
        scored("code", {"input": ["1"]}, **PLAIN),
        ("ground truth", "has the keys input", "expected inputs and outputs", "correct the row"),
    ),
    (
        "tests of unequal number",
        scored("code", {"inputs": ["1"], "outputs": []}, **PLAIN),
        ("ground truth", "1 inputs and 0 outputs", "expected as many", "correct the row"),
    ),
    (
        "no ground truth",
        scored("code", None, **PLAIN),
        ("ground truth 'None'", "has no tests", "expected a dict, a list or text", "set data.answer_key"),
    ),
    (
        "test case that is no JSON",
        scored("code", '{"inputs": ["1"], ', **PLAIN),
        ("""ground truth '{"inputs": ["1"], '""", "neither JSON nor tests", "expected inputs and", "correct the row"),
    ),
    (
        "instructions without a field",
        scored("ifeval", {"instruction_id_list": ["punctuation:no_comma"]}),
        ("ground truth", "is {'instruction_id_list'", "expected a dict or JSON with the lists", "put them there"),
    ),
    (
        "search without an answer",
        scored("search_qa", None),
        ("ground truth", "is None", "expected a text or a list of texts", "write at least one"),
    ),
    (
        "letter that is none",
        scored("multiple_choice", "the first"),
        ("ground truth", "is 'the first'", "expected B, (B)", "write the letter"),
    ),
    (
        "language without a toolchain",
        scored("code", STDIN, RUST, **LOST),
        ("language 'rust'", "no-such-rustc is not there", "expected it in", "install it"),
    ),
    (
        "language that is not in the sandbox",
        raised(scored("code", STDIN, RUST, language="rust", **PLAIN)),
        ("language='rust'", "is not in the sandbox", "which has python", "add it in languages"),
    ),
    (
        "sandbox service that is not there",
        scored("code", STDIN, "```python\nprint(1)\n```", sandbox="http://127.0.0.1:9"),
        ("the sandbox at http://127.0.0.1:9", "gave no result", "expected a service", "start it"),
    ),
    (
        "unknown sandbox",
        raised(scored("code", STDIN, sandbox="bubblewarp")),
        ("'bubblewarp'", "no sandbox is called", "expected bubblewrap", "unisolated"),
    ),
    (
        "endpoint that is not there",
        scored("llm_judge", "1", endpoint=NOWHERE, model="m", retries=0),
        (
            f"the judge 'm' at {NOWHERE}",
            "it cannot be reached",
            "expected a reply of an OpenAI",
            "correct the endpoint",
        ),
    ),
    (
        "endpoint that is no address",
        raised(scored("llm_judge", "1", endpoint="localhost", model="m")),
        ("endpoint='localhost'", "is no address", "expected one such as", "http://"),
    ),
    (
        "endpoint that refuses the key",
        unauthorised,
        ("the judge at ADDRESS", "refused the key (401)", "expected it in the environment variable", "set it to a"),
    ),
    (
        "rubric without its parser's field",
        raised(rubric("{template: 'Good? {{ response }}', parser: scale}")),
        ("rubric 'mine'", "does not have 'Score:'", "parser=scale reads", "add it to the template"),
    ),
    (
        "rubric without a parser",
        raised(rubric("{template: 'Good? {{ response }}'}")),
        ("rubric mine.yaml", "has no 'parser'", "expected a mapping with", "add it"),
    ),
    (
        "unknown rubric",
        raised(lambda: load_rubric("yes")),
        ("'yes'", "no rubric is called", "expected yes_no, scale", "or a .yaml or .json file"),
    ),
]


@pytest.mark.parametrize(("say", "parts"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_an_error_has_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, say: Callable[[], str], parts: tuple[str, str, str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    said = say()
    assert [part for part in parts if part not in said] == [], said


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    open_sandbox.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    said = raised(scored("code", STDIN, sandbox="bubblewrap"))()
    parts = ("sandbox=bubblewrap", "is not installed", "expected the command bwrap", "install bubblewrap")
    assert [part for part in parts if part not in said] == [], said


def test_the_warning_of_a_failure_names_its_trajectory(caplog: pytest.LogCaptureFixture) -> None:
    [prompt] = prompts(("additions", {}))
    failed = Trajectory("0:0:1", prompt, (), 1, failure=Failure("reward", "why"))
    with caplog.at_level(logging.WARNING):
        FailureWatch().record([Group(prompt, (Trajectory("0:0:0", prompt, (), 0), failed))])
    assert "the first in the reward: why (trajectory 0:0:1; warned once" in caplog.text
