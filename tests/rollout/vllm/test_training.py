# SPDX-License-Identifier: Apache-2.0
"""Runs whose responses vLLM samples: equal to those of the native engine, which draws with the same numbers."""

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

from whet.checkpoints.export import export
from whet.config import TrainConfig
from whet.protocol import DataProto
from whet.trainers.build import train
from whet.trainers.run import Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
log = logging.getLogger(__name__)
MakeConfig = Callable[..., TrainConfig]
ENGINE = {
    "rollout.engine.name": "vllm",
    "rollout.engine.options": {"kv_cache_bytes": 2**26, "threads": 1},
    "trainer.total_steps": 4,
    "actor.optim.lr": 1e-2,
    "actor.mini_batch_size": 2,  # two updates a step, which need log-probs of the trainer
    "data.max_response_length": 24,
}
APART = {"cluster.placement": {"train": {"roles": ["actor"]}, "sample": {"roles": ["rollout"]}}}
STEPS = 8  # of a run that samples ahead
SPLIT = {"train": {"roles": ["actor"]}, "sample": {"roles": ["rollout"], "devices": 2}}
GAME = {
    "name": "whet_environments.number_game:NumberGame",
    "options": {"rounds": 3, "encoding": "compact", "context": "append", "max_tokens": 3},
}
CASES: dict[str, dict[str, Any]] = {
    "beside the actor": {},
    "in a pool of its own": APART,
    "episodes of three turns": {"environment": GAME, "data.max_response_length": 32, **APART},
    "bfloat16": {"rollout.dtype": "bfloat16"},
    "an adapter added in": {"model.lora.rank": 4},
    "an adapter beside the weights": {"model.lora.rank": 4, "model.lora.alpha": 12.0},
    "two devices in a Ray actor": {"cluster.backend": "ray", "cluster.address": "local", "cluster.placement": SPLIT},
    "an adapter sent to another pool": {"model.lora.rank": 4, "model.lora.target_modules": ["q_proj"], **APART},
}
OPTIONS = {case: {"adapter": True} for case in ("an adapter beside the weights", "an adapter sent to another pool")}


def pays_for_sevens(solution_str: str) -> float:
    return float(solution_str.count("7"))


def metrics_of(config: TrainConfig, additions: list[dict[str, Any]]) -> list[dict[str, float]]:
    train(config, reward=pays_for_sevens, data=additions)
    lines = (Path(str(config.trainer.run_dir)) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_of_the_native_engine(
    has_vllm: None, train_config: MakeConfig, additions: list[dict[str, Any]], tmp_path: Path, case: str
) -> None:
    """Every step samples with the weights that the last one trained: the log-probs of both sides agree."""
    settings = {**ENGINE, **CASES[case]}
    settings["rollout.engine.options"] = {**ENGINE["rollout.engine.options"], **OPTIONS.get(case, {})}
    run = metrics_of(train_config({**settings, "trainer.run_dir": tmp_path / "vllm"}), additions)
    steps = [line for line in run if "correction/abs_max" in line]
    worst = [line["correction/abs_max"] for line in steps]
    log.info("%s: largest gap of log-probs at each step: %s", case, ", ".join(f"{each:.1e}" for each in worst))
    assert len(steps) == 4
    if case == "bfloat16":
        assert max(worst) < 0.1 and max(line["correction/abs_mean"] for line in steps) < 0.01
        return
    assert max(worst) < 2e-5
    native = {**settings, "rollout.engine.name": "native", "rollout.engine.options": {}}
    native |= {"cluster.backend": "local", "cluster.address": None, "cluster.placement": {}}
    other = metrics_of(train_config({**native, "trainer.run_dir": tmp_path / "native"}), additions)
    for name in ("critic/rewards/mean", "response_length/mean", "actor/grad_norm"):
        assert [line[name] for line in steps] == pytest.approx([line[name] for line in other if name in line], rel=1e-3)


def test_turns_sampled_ahead_carry_the_version_of_each_token(
    has_vllm: None,
    train_config: MakeConfig,
    additions: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Episodes of three turns whose server gets weights while it samples: the log-prob of each token is that of the
    checkpoint of its version, and not of the one before or after."""
    batches: list[DataProto] = []
    monkeypatch.setattr(Run, "write_tokens", lambda run, step, batch: batches.append(batch))
    ahead = {"rollout.max_staleness": 1, "algorithm.correction.weight": "importance"}
    saved = {"trainer.total_steps": STEPS, "trainer.save_freq": 1, "trainer.save_limit": STEPS}
    config = train_config({**ENGINE, **CASES["episodes of three turns"], **ahead, **saved})
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
def log_probs(model: PreTrainedModel, batch: DataProto) -> torch.Tensor:
    """[B, R] of the responses, each row computed alone."""
    out, prompt = torch.zeros_like(batch["rollout_log_probs"]), batch["prompts"].shape[1]
    for row, (mask, ids) in enumerate(zip(batch["attention_mask"] != 0, batch["input_ids"], strict=True)):
        found = model(ids[mask][None]).logits[0, :-1].log_softmax(-1).gather(1, ids[mask][1:, None])[:, 0]
        length = int(mask[prompt:].sum())
        out[row, :length] = found[-length:]
    return out
