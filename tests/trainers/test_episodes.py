# SPDX-License-Identifier: Apache-2.0
"""Runs with episodes of several turns: on other engines, and while weights arrive."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.config import TrainConfig
from whet.trainers.build import train

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
    for name in ("critic/score/mean", "response_length/mean", "actor/grad_norm", "env/NumberGame/right"):
        assert [line[name] for line in plain] == pytest.approx([line[name] for line in native], rel=1e-4)


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_weights_arrive_while_episodes_run(
    train_config: MakeConfig, additions: list[dict[str, Any]], tmp_path: Path, engine: str
) -> None:
    apart = {"cluster.placement": {"train": {"roles": ["actor"]}, "sample": {"roles": ["rollout"]}}}
    found = lines(train_config, additions, tmp_path / "run", **CORRECTED, **apart, **{"rollout.engine.name": engine})
    assert [line["step"] for line in found] == [1, 2, 3]
    assert max(line["staleness/max"] for line in found) >= 1
    assert all(line["episode/turns"] == 3.0 and "failures/environment" not in line for line in found)
