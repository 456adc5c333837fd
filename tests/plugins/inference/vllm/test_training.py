# SPDX-License-Identifier: Apache-2.0
"""Runs whose responses vLLM samples: equal to runs with the native engine, which draws with the same numbers."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import server_episodes as episodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
log = logging.getLogger(__name__)
ENGINE = episodes.settings("vllm")
APART = {"cluster.placement": {"train": {"roles": ["actor"]}, "sample": {"roles": ["rollout"]}}}
SPLIT = {"train": {"roles": ["actor"]}, "sample": {"roles": ["rollout"], "devices": 2}}
CASES: dict[str, dict[str, Any]] = {
    "beside the actor": {},
    "apart": APART,
    "episodes of three turns": {"environment": episodes.GAME, "data.max_response_length": 32, **APART},
    "bfloat16": {"rollout.dtype": "bfloat16"},
    "an adapter added in": {"model.lora.rank": 4},
    "an adapter beside the weights": {"model.lora.rank": 4, "model.lora.alpha": 12.0},
    "two devices in a Ray actor": {"cluster.backend": "ray", "cluster.address": "local", "cluster.placement": SPLIT},
    "an adapter sent to another pool": {"model.lora.rank": 4, "model.lora.target_modules": ["q_proj"], **APART},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "an adapter beside the weights": {"adapter": True},
    "an adapter sent to another pool": {"adapter": True},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_of_the_native_engine(
    has_vllm: None, train_config: episodes.MakeConfig, additions: list[dict[str, Any]], tmp_path: Path, case: str
) -> None:
    """Every step samples with the weights that the last one trained: the log-probs of both sides agree."""
    check_run(train_config, additions, tmp_path, CASES[case], OPTIONS.get(case, {}), case)


def check_run(
    train_config: episodes.MakeConfig,
    additions: list[dict[str, Any]],
    tmp_path: Path,
    changes: dict[str, Any],
    options: dict[str, Any],
    case: str,
) -> None:
    """Compares a run with one whose responses the native engine samples."""
    settings = {**ENGINE, **changes}
    settings["rollout.engine.options"] = {**ENGINE["rollout.engine.options"], **options}
    with pytest.MonkeyPatch.context() as patch:
        # of tests/conftest.py: with it oneDNN does not ask Linux for AMX, and vLLM's kernels end with SIGILL
        patch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        run = episodes.metrics_of(train_config({**settings, "trainer.run_dir": tmp_path / "vllm"}), additions)
    steps = [line for line in run if "correction/abs_max" in line]
    worst = [line["correction/abs_max"] for line in steps]
    log.info("%s: largest gap of log-probs at each step: %s", case, ", ".join(f"{each:.1e}" for each in worst))
    assert len(steps) == 4
    if settings.get("rollout.dtype") == "bfloat16":
        assert max(worst) < 0.1 and max(line["correction/abs_mean"] for line in steps) < 0.01
        return
    assert max(worst) < 2e-5
    native = {**settings, "rollout.engine.name": "native", "rollout.engine.options": {}}
    native |= {"cluster.backend": "local", "cluster.address": None, "cluster.placement": {}}
    other = episodes.metrics_of(train_config({**native, "trainer.run_dir": tmp_path / "native"}), additions)
    for name in ("critic/rewards/mean", "response_length/mean", "actor/grad_norm"):
        assert [line[name] for line in steps] == pytest.approx([line[name] for line in other if name in line], rel=1e-3)


def test_turns_sampled_ahead_carry_the_version_of_each_token(
    has_vllm: None,
    train_config: episodes.MakeConfig,
    additions: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    episodes.check_turns_ahead(train_config, additions, tmp_path, monkeypatch, {**ENGINE, **APART})
