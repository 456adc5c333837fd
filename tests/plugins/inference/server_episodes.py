# SPDX-License-Identifier: Apache-2.0
"""Runs with episodes of three turns, which every rollout engine with a server of its own is held to."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from whet.batch import Batch
from whet.checkpoints.export import export
from whet.config import TrainConfig
from whet.trainers.build import train
from whet.trainers.run import Run

log = logging.getLogger(__name__)
MakeConfig = Callable[..., TrainConfig]
STEPS = 8  # of a run that samples ahead
GAME = {
    "name": "whet_environments.number_game:NumberGame",
    "options": {"rounds": 3, "encoding": "compact", "context": "append", "max_tokens": 3},
}
THREE_TURNS = {"environment": GAME, "data.max_response_length": 32}


def settings(engine: str) -> dict[str, Any]:
    """The settings of a run of four steps whose responses the engine samples."""
    return {
        "rollout.engine.name": engine,
        "rollout.engine.options": {"kv_cache_bytes": 2**26, "threads": 1},
        "trainer.total_steps": 4,
        "actor.optim.lr": 1e-2,
        "actor.mini_batch_size": 2,  # two updates a step, which need log-probs of the trainer
        "data.max_response_length": 24,
    }


def pays_for_sevens(solution_str: str) -> float:
    return float(solution_str.count("7"))


def metrics_of(config: TrainConfig, additions: list[dict[str, Any]]) -> list[dict[str, float]]:
    train(config, reward=pays_for_sevens, data=additions)
    lines = (Path(str(config.trainer.run_dir)) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check_turns_ahead(
    train_config: MakeConfig,
    additions: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
) -> None:
    """Checks episodes of three turns whose server gets weights while it samples: the log-prob of each token belongs to
    the checkpoint of its version, not to the one before or after."""
    batches: list[Batch] = []
    monkeypatch.setattr(Run, "write_tokens", lambda run, step, batch: batches.append(batch))
    ahead = {"rollout.max_staleness": 1, "algorithm.correction.weight": "importance"}
    saved = {"trainer.total_steps": STEPS, "trainer.save_freq": 1, "trainer.save_limit": STEPS}
    config = train_config({**settings, **THREE_TURNS, **ahead, **saved})
    run = train(config, reward=pays_for_sevens, data=additions)
    staleness = [line["staleness/max"] for line in run.history if "staleness/max" in line]
    assert len(staleness) == len(batches) == STEPS and max(staleness) == 1, staleness
    models = {0: AutoModelForCausalLM.from_pretrained(config.model.path)}
    for step in range(1, STEPS):
        folder = export(run.run_dir / "checkpoints" / f"global_step_{step}", tmp_path / f"model_{step}")
        models[step] = AutoModelForCausalLM.from_pretrained(folder)
    own, other, ages, mixed = [], [], set(), 0
    for step, batch in enumerate(batches, start=1):
        sampled, versions = batch["response_mask"] != 0, batch["policy_version"]
        assert int(batch["turn_ids"][sampled].max()) == 2  # three turns
        known = {number: log_probs(models[number], batch) for number in (step - 2, step - 1) if number >= 0}
        for number, each in known.items():
            gaps = (each - batch["rollout_log_probs"]).abs()[sampled]
            is_own = versions[sampled] == number
            own += gaps[is_own].tolist()
            other += gaps[~is_own].tolist()
        ages |= set((step - 1 - versions[sampled]).tolist())
        for row, mask in zip(versions, sampled, strict=True):
            assert row[mask].diff().min() >= 0, "later tokens have no older version"
            mixed += int(row[mask].unique().numel() > 1)
    assert ages == {0, 1}
    log.info("%d tokens, %d rows of two versions: gaps up to %.1e", len(own), mixed, max(own))
    log.info("to other versions the median gap is %.1e", median(other))
    assert len(own) == sum(int((batch["response_mask"] != 0).sum()) for batch in batches)
    assert max(own) < 2e-5 and median(other) > 1e-2


@torch.no_grad()
def log_probs(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """[B, R] of the responses, each row computed alone."""
    out, prompt = torch.zeros_like(batch["rollout_log_probs"]), batch["prompts"].shape[1]
    for row, (mask, ids) in enumerate(zip(batch["attention_mask"] != 0, batch["input_ids"], strict=True)):
        found = model(ids[mask][None]).logits[0, :-1].log_softmax(-1).gather(1, ids[mask][1:, None])[:, 0]
        length = int(mask[prompt:].sum())
        out[row, :length] = found[-length:]
    return out
