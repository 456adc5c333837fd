# SPDX-License-Identifier: Apache-2.0
"""The runs of docs/serving.md whose judge, hints and environment ask a server, with its files and commands."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_processes import Running, started

from tests.docs.pages import ROOT, blocks, logical_lines
from whet.config import TrainConfig, load_config
from whet.models.load import load_tokenizer
from whet.plugins.lessons.init_model import init_model
from whet.trainers.build import build, build_scorer
from whet.trainers.teacher import chat_of, hints_of

pytestmark = pytest.mark.slow
PAGE = blocks(ROOT / "docs" / "serving.md")
Run = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder: the files that the page shows, and a model."""
    folder = tmp_path_factory.mktemp("reader")
    for block in PAGE:
        if block.title and block.language != "text":
            (folder / block.title).write_text(block.code)
    init_model(folder / "my_model", "qwen3", "tiny")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with started(folder / "my_model", "--name", "judge") as running:
        yield running


@pytest.fixture
def address(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the two variables of the page."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.address}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")


@pytest.fixture
def run(folder: Path, address: None) -> Run:
    """Runs the page's command with this experiment name.  Returns the run's folder."""
    lines = [line for block in PAGE if block.language == "bash" for line in logical_lines(block.code)]

    def execute(name: str) -> Path:
        [line] = [line for line in lines if line.endswith(f"trainer.experiment_name={name}")]
        words = [sys.executable, "-m", *shlex.split(line)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return folder / "runs" / "whet" / name

    return execute


@pytest.fixture
def served(folder: Path, address: None) -> dict[str, Any]:
    """The names of the page's served.py."""
    return runpy.run_path(str(folder / "served.py"))


def rows(run_folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_folder / "rollouts" / "step_000001.jsonl").open()]


def num_answered(server: Running) -> int:
    """Chats that the server has answered."""
    name = 'whet_requests_total{path="/v1/chat/completions",status="200"} '
    with server.http() as http:
        return sum(
            int(float(line.removeprefix(name))) for line in http.get("/metrics").text.splitlines() if name in line
        )


def plain(folder: Path, text: str) -> str:
    """The text without special tokens, as rewards and environments read it."""
    for token in load_tokenizer(folder / "my_model").all_special_tokens:
        text = text.replace(token, "")
    return text


def test_a_served_judge_gives_the_rewards(run: Run, server: Running, folder: Path, served: dict[str, Any]) -> None:
    before = num_answered(server)
    found = rows(run("judged"))
    assert num_answered(server) - before == len(found) == 8
    for row in found:
        problem = "What is 2 + 3?" if row["ground_truth"] == "5" else "What is 4 + 4?"
        try:
            expected = served["score"](plain(folder, row["response"]), problem)
        except ValueError as error:
            assert str(error) in row["failure"]["message"]
        else:
            assert (row["reward"], row["failure"]) == (expected, None)
    assert len({row["reward"] for row in found}) > 1


def test_a_served_judge_gives_the_hints(run: Run, server: Running, folder: Path) -> None:
    before = num_answered(server)
    metrics = json.loads((run("hinted") / "metrics.jsonl").read_text().splitlines()[0])
    assert num_answered(server) - before == 2  # one for each prompt
    assert metrics["cpo/k"] != 0 and metrics["cpo/added"] != 0


def test_the_hints_are_the_replies_of_the_server(
    folder: Path, served: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    changes = {
        "algorithm.adv_estimator": "cpo",
        "teacher.hint": "judge",
        "teacher.hint_options": {"complete": "served.py:complete", "instruction": "Be brief."},
        "data.max_response_length": 4,
    }
    config = load_config(TrainConfig, "run.yaml", changes).config
    run = build(config, build_scorer(config.reward))
    try:
        groups = run.rollouts.start(2, step=1).result().groups
        chat = chat_of(run.tokenizer, config.data, config.environment)
        hints = hints_of(run.sources(groups, 1), config.teacher, chat)
    finally:
        run.close()
    for group, found in zip(groups, hints, strict=True):
        asked = [{"role": "system", "content": "Be brief."}, *(each.to_dict() for each in group.prompt.messages)]
        assert found == [served["complete"](asked)] * 4
    assert hints[0] != hints[1]


def test_an_environment_has_a_served_user(run: Run, server: Running, folder: Path, served: dict[str, Any]) -> None:
    before = num_answered(server)
    found = rows(run("asked"))
    assert num_answered(server) - before == len(found) == 8
    assert all(row["failure"] is None for row in found)
    answered = [row for row in found if row["turns"] == 2]
    assert answered  # of the others the first turn took all tokens
    for row in answered:
        first, _, rest = row["response"].partition("<|im_end|>")
        observation = served["User"](None).step(plain(folder, first))
        [message] = observation.messages
        assert rest.startswith(f"\n<|im_start|>user\n{message.content}<|im_end|>")
