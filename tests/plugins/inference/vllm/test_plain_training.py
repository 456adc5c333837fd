# SPDX-License-Identifier: Apache-2.0
"""Runs whose responses vLLM samples in plain mode, with the versions of test_plain_servers.py."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import server_conformance as servers
import server_episodes as episodes

from whet.config import TrainConfig
from whet.errors import WeightSyncError
from whet.plugins.inference.vllm.engine import VLLMEngine
from whet.trainers.build import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
log = logging.getLogger(__name__)
OTHER = os.environ.get("WHET_VLLM_OTHER_PYTHON")
OPTIONS: dict[str, dict[str, Any]] = {"pinned": {"plain": True}} | ({"other": {"python": OTHER}} if OTHER else {})


def settings(folder: Path, name: str) -> dict[str, Any]:
    """The settings of a short run of GRPO; the tokenizer knows all texts, as newer versions encode some of their
    own."""
    found = episodes.settings("vllm")
    found["rollout.engine.options"] |= OPTIONS[name]
    servers.random_model(folder, "qwen2.5", hidden_size=128, num_layers=2)
    return {**found, "model.path": str(folder / "sharp"), "trainer.run_dir": str(folder / "run")}


def metrics_of(config: TrainConfig, rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The metrics of a run whose reward differs within every group."""
    train(config, reward=lambda solution_str: float(sum(map(ord, solution_str)) % 7), data=rows)
    return [json.loads(line) for line in Path(str(config.trainer.run_dir), "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_trains(
    has_vllm: None,
    train_config: episodes.MakeConfig,
    additions: list[dict[str, Any]],
    tmp_path: Path,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every step samples with the weights that the last one trained: log-probs of both sides agree, and the canary,
    which compares them, is silent. It says at its start what it does without."""
    run = metrics_of(train_config(settings(tmp_path, name)), additions)
    steps = [line for line in run if "correction/abs_max" in line]
    worst = [line["correction/abs_max"] for line in steps]
    log.info("%s: largest gap of log-probs at each step: %s", name, ", ".join(f"{each:.1e}" for each in worst))
    assert len(steps) == 4 and max(worst) < 2e-5
    assert all(line["actor/grad_norm"] > 0 for line in steps)
    assert sum("in plain mode" in each.getMessage() for each in caplog.records) == 1


def test_the_canary_hears_of_weights_that_did_not_arrive(
    has_vllm: None,
    train_config: episodes.MakeConfig,
    additions: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = VLLMEngine.load
    monkeypatch.setattr(
        VLLMEngine,
        "load",
        lambda engine, weights, version: sent(engine, ((name, weight * -1) for name, weight in weights), version),
    )
    with raises(WeightSyncError, key=re.compile(r"^step \d+$"), found=re.compile(" nats ")):
        metrics_of(train_config(settings(tmp_path, "pinned")), additions)
