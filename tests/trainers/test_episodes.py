# SPDX-License-Identifier: Apache-2.0
"""Runs with episodes of several turns: on other engines, and while weights arrive."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from whet_environments.number_game import NumberGame

from examples.search_qa import write
from whet.config import TrainConfig, load_config
from whet.environments.calls import Call
from whet.environments.protocol import Answer
from whet.keyed import key
from whet.plugins.lessons.init_model import init_model
from whet.trainers.build import train
from whet.types import Prompt

pytestmark = pytest.mark.slow
MakeConfig = Callable[..., TrainConfig]
GAME = {
    "environment": {
        "name": "whet_environments.number_game:NumberGame",
        "options": {"rounds": 3, "encoding": "compact", "context": "append", "max_tokens": 3},
        "max_turns": 3,
    },
    "data.apply_chat_template": False,
    "data.max_response_length": 32,
    "trainer.total_steps": 3,
    "actor.optim.lr": 1e-2,
}
CORRECTED = {"rollout.max_staleness": 2, "algorithm.correction.weight": "importance"}


def lines(make: MakeConfig, additions: list[dict[str, Any]], folder: Path, **more: Any) -> list[dict[str, float]]:
    train(make({**GAME, "trainer.run_dir": str(folder), **more}), data=additions)
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "actor/grad_norm" in line]


@pytest.mark.parametrize("context", ["append", "replace"])
def test_engines_agree(train_config: MakeConfig, additions: list[dict[str, Any]], tmp_path: Path, context: str) -> None:
    options = {**GAME["environment"]["options"], "context": context}  # type: ignore[index]
    game = {"environment": {**GAME["environment"], "options": options}}  # type: ignore[dict-item]
    native = lines(train_config, additions, tmp_path / "native", **game)
    plain = lines(train_config, additions, tmp_path / "hf", **game, **{"rollout.engine.name": "hf"})
    assert len(native) == 3 and all(line["episode/turns"] == 3.0 for line in native)
    for name in ("critic/score/mean", "response_length/mean", "actor/grad_norm", "env/number_game/right"):
        assert [line[name] for line in plain] == pytest.approx([line[name] for line in native], rel=1e-4)


def test_rollouts_show_every_turn(train_config: MakeConfig, additions: list[dict[str, Any]], tmp_path: Path) -> None:
    """The same game, played by hand with the actions of the file, says the same."""
    lines(train_config, additions, tmp_path / "run")
    options: dict[str, Any] = GAME["environment"]["options"]  # type: ignore[index]
    shown = set[float]()
    for number in (1, 2, 3):
        for line in (tmp_path / "run" / "rollouts" / f"step_{number:06d}.jsonl").read_text().splitlines():
            record, prompt = json.loads(line), json.loads(line)["uid"].rpartition(":")[0]
            game = NumberGame(**options)
            seen = game.reset(Prompt(prompt, 0, (), (1,), "", None), key(0, "environment", "rollout", number, prompt))
            assert len(record["steps"]) == record["turns"] == 3
            for step in record["steps"]:
                assert step["observation"] == [message.to_dict() for message in seen.messages]
                assert step["state"] == seen.state_key
                seen = game.step(Answer(step["action"]))
                assert step["reward"] == seen.reward
                shown.add(step["reward"])
            assert seen.done and step["end"] == [message.to_dict() for message in seen.messages]
    assert len(shown) > 1


def test_two_steps_of_the_recipe_of_search_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = init_model(tmp_path / "model", "qwen2.5", "nano", num_layers=1, max_position_embeddings=2048)
    write(tmp_path, 0, 20, 4)
    monkeypatch.chdir(tmp_path)
    values = {
        "model.path": str(model),
        "data.train_files": ["train.jsonl"],
        "data.val_files": ["held_out.jsonl"],
        "data.train_batch_size": 2,
        "data.max_response_length": 96,
        "rollout.n": 2,
        "trainer.total_steps": 2,
        "trainer.run_dir": str(tmp_path / "run"),
    }
    train(load_config(TrainConfig, "search_qa", values).config)
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in found if "actor/grad_norm" in line]
    assert [line["step"] for line in trained] == [1, 2]
    assert all("failures/tool" not in line and line["tools/calls"] >= 0.0 for line in trained)
    [record, *_] = map(json.loads, (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text().splitlines())
    assert '"name": "search"' in record["prompt"] and record["ground_truth"]


def always_calls(text: str, schemas: Mapping[str, Any]) -> Iterator[str | Call]:
    """Each turn calls the server, of whose sessions one dies."""
    yield text
    yield Call("bad", {"what": "once"})


def test_a_server_that_dies_costs_its_episode_alone(
    train_config: MakeConfig, additions: list[dict[str, Any]], tmp_path: Path
) -> None:
    pytest.importorskip("mcp", reason="MCP is not installed: pip install -e '.[mcp]'")
    server = str(Path(__file__).parents[1] / "plugins" / "agents" / "tools" / "servers.py")
    started = {"command": [sys.executable, server], "env": {"MARK": str(tmp_path / "died")}}
    values = {
        "environment.tools": [{"mcp": started}],
        "environment.tool_parser": f"{__file__}:always_calls",
        "environment.tool_role": "user",
        "environment.tool_limits": {"start_seconds": 100.0, "seconds": 50.0},
        "environment.max_turns": 2,
        "environment.max_turn_tokens": 3,
        "data.max_response_length": 64,
        "data.train_batch_size": 2,
        "rollout.n": 2,
        "trainer.total_steps": 3,
    }
    train(train_config(values), reward=lambda solution_str: 1.0, data=additions)
    folder = tmp_path / "run"
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line.get("failures/tool")) for line in found] == [(1, 1.0), (2, None), (3, None)]
    assert [line["tools/calls"] >= 1.0 for line in found] == [True] * 3
    for step, num_failed in ((1, 1), (2, 0), (3, 0)):
        rows = [json.loads(row) for row in (folder / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]
        failures = [row["failure"] for row in rows if row.get("failure")]
        assert (len(rows), len(failures)) == (4, num_failed)
        assert [row["reward"] for row in rows if not row.get("failure")] == [1.0] * (4 - num_failed)
        for failure in failures:
            assert failure["source"] == "tool"
            assert failure["message"].startswith(f"environment.tools[0]: MCP server ['{sys.executable}'")


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_weights_arrive_while_episodes_run(
    train_config: MakeConfig, additions: list[dict[str, Any]], tmp_path: Path, engine: str
) -> None:
    apart = {"cluster.placement": {"train": {"roles": ["actor"]}, "sample": {"roles": ["rollout"]}}}
    found = lines(train_config, additions, tmp_path / "run", **CORRECTED, **apart, **{"rollout.engine.name": engine})
    assert [line["step"] for line in found] == [1, 2, 3]
    assert max(line["staleness/max"] for line in found) >= 1
    assert all(line["episode/turns"] == 3.0 and "failures/environment" not in line for line in found)
