# SPDX-License-Identifier: Apache-2.0
"""The general way against transformers' own forward on one row at a time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
import engine_conformance as suite
import rollout_conformance

from tests.models.nano import NANO, nano_model
from whet.config.schema import EngineConfig, OptimConfig
from whet.engines.role import RoleSettings
from whet.engines.single import SingleEngine
from whet.models.load import load_policy
from whet.models.supported import support_of
from whet.rollout.hf import HFEngine
from whet.trainers.objectives import ImitationObjective

FAST = ["qwen3_5_text", "deepseek_v3", "gpt_oss", "mamba2", "minimax"]
KINDS = [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in NANO]


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nano_model(tmp_path_factory.mktemp("nano") / "model", request.param)


def engine_of(folder: Path, tokens: int = 10**6) -> SingleEngine:
    return SingleEngine(RoleSettings(str(folder), EngineConfig(), "float32", tokens, OptimConfig(lr=1e-3)))


def gradients(engine: SingleEngine, tokens: int) -> dict[str, torch.Tensor]:
    engine.max_tokens_per_micro_batch = tokens
    engine.forward_backward(suite.ragged_batch(), ImitationObjective())
    found = {name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None}
    engine.model.zero_grad()
    engine._loss = None
    return found


def test_log_probs_are_those_of_each_row_alone(folder: Path) -> None:
    batch, engine = suite.ragged_batch(), engine_of(folder)
    found = engine.forward(batch, frozenset({"log_probs"}))["log_probs"]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    width = batch["response_mask"].shape[1]
    for row in range(len(batch)):
        real = batch["attention_mask"][row].bool()
        ids, sampled = batch["input_ids"][row, real], batch["response_mask"][row].bool()
        with torch.no_grad():
            log_pi = plain(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        expected = torch.zeros(len(real))
        expected[real.nonzero()[1:, 0]] = log_pi.gather(1, ids[1:, None])[:, 0]
        torch.testing.assert_close(found[row, sampled], expected[-width:][sampled], atol=1e-5, rtol=0)


def test_the_gradient_of_a_padded_micro_batch_is_that_of_rows_one_at_a_time(folder: Path) -> None:
    engine = engine_of(folder)
    together, alone = gradients(engine, 10**6), gradients(engine, 1)
    assert together.keys() == alone.keys()
    norm = torch.stack([each.norm() for each in alone.values()]).norm()
    for name, expected in alone.items():
        assert (together[name] - expected).norm() < 1e-5 * norm, name


def test_log_probs_of_the_rollout_are_those_of_the_model(folder: Path) -> None:
    model = load_policy(folder).eval()
    engine = HFEngine()
    engine.attach(model, 0)
    rollout_conformance.check_log_probs(engine, model, rollout_conformance.requests(longest=12))


class _Recomputed(HFEngine):
    """Keeps no cache."""

    def attach(self, module: Any, version: int, *, is_own: bool = False) -> None:
        super().attach(module, version, is_own=is_own)
        vars(module.base_model)["support"] = type(support_of(module))("a cache", caches=False)


def test_a_model_without_a_cache_reads_its_rows_again(tmp_path: Path) -> None:
    model = load_policy(nano_model(tmp_path / "model", "gpt_oss")).eval()
    engine = _Recomputed()
    engine.attach(model, 0)
    rollout_conformance.check_log_probs(engine, model, rollout_conformance.requests(longest=6))
