# SPDX-License-Identifier: Apache-2.0
"""Runs whose reward and whose environment ask a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_processes import Running

from whet.config import TrainConfig
from whet.trainers.build import train

pytestmark = pytest.mark.slow
CODE = """
import openai
from whet.environments.protocol import Observation
from whet.types import Message

def ask(url, text):
    client = openai.OpenAI(base_url=url, api_key="any")
    chat = client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], temperature=0)
    return chat.choices[0].message.content

def judge(solution_str, *, url):
    return float(ask(url, str(sum(each.isdigit() for each in solution_str))))

class Partner:
    def __init__(self, *, url):
        self.url, self.turns = url, 0
    def reset(self, prompt, seed):
        return Observation(False)
    def step(self, answer):
        self.turns += 1
        said = ask(self.url, f"turn {self.turns}")
        return Observation(self.turns == 2, (Message("user", said),), reward=float(said.split()[1]))
"""


@pytest.fixture
def code(tmp_path: Path) -> str:
    pytest.importorskip("openai")
    (tmp_path / "asks.py").write_text(CODE)
    return str(tmp_path / "asks.py")


def rows(config: TrainConfig, additions: list[dict[str, str]], reward: Any = None) -> list[dict[str, Any]]:
    train(config, reward=reward, data=additions)
    folder = Path(str(config.trainer.run_dir)) / "rollouts"
    return [json.loads(line) for file in sorted(folder.glob("step_*.jsonl")) for line in file.open()]


def test_a_judge(
    echo: Running, code: str, train_config: Callable[..., TrainConfig], additions: list[dict[str, str]]
) -> None:
    """It says how many digits a response has, which it was told."""
    settings = {"reward.function": f"{code}:judge", "reward.kwargs": {"url": f"{echo.address}/v1"}}
    found = rows(train_config({**settings, "trainer.log_rollouts": 1}), additions)
    assert len({row["reward"] for row in found}) > 2
    assert all(row["reward"] == sum(each.isdigit() for each in row["response"]) for row in found)


def test_an_environment(
    echo: Running, code: str, train_config: Callable[..., TrainConfig], additions: list[dict[str, str]]
) -> None:
    """It asks the server for its words, in two turns where there is room: `turn 1` and `turn 2`, which pay 1 and 2."""
    settings = {
        "environment.name": f"{code}:Partner",
        "environment.options": {"url": f"{echo.address}/v1"},
        "environment.max_turns": 2,
        "data.max_response_length": 96,
        "trainer.log_rollouts": 1,
    }
    found = rows(train_config(settings), additions, reward=lambda solution_str: 0.0)
    paid = [(row["turns"], row["reward"]) for row in found]
    assert set(paid) == {(1, 1.0), (2, 3.0)} and paid.count((2, 3.0)) > len(paid) / 2
