# SPDX-License-Identifier: Apache-2.0
"""The reference engine: equal to a plain backward pass, and to itself however the work is split."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parent))
import engine_conformance as suite

from whet.config.schema import EngineConfig, OptimConfig
from whet.engines.role import RoleSettings
from whet.engines.single import SingleEngine
from whet.errors import EngineError
from whet.metrics import Metrics
from whet.models.outputs import ForwardSettings
from whet.trainers.objectives import ImitationObjective, PolicyObjective

# A large eps makes AdamW close to plain gradient descent: its steps then show the gradient's size, not only its sign.
OPTIM = OptimConfig(lr=1e-3, eps=1.0, weight_decay=0.0)


def engine(folder: Path, variant: suite.Variant, optim: OptimConfig | None = OPTIM) -> SingleEngine:
    return SingleEngine(
        RoleSettings(
            str(folder),
            EngineConfig(packing=variant.packing, logits_chunk_tokens=16),
            "float32",
            variant.max_tokens_per_micro_batch,
            optim,
        )
    )


@pytest.mark.parametrize("variant", suite.VARIANTS)
def test_gradient_under_any_split(variant: suite.Variant, model_folder: Path) -> None:
    def gradient(of: SingleEngine) -> torch.Tensor:
        suite.update(of, suite.ragged_batch(), suite.OBJECTIVES[1])
        return torch.cat([p.grad.flatten() for p in of.model.parameters() if p.grad is not None])

    expected = gradient(engine(model_folder, suite.Variant(False, 10**6)))
    assert (gradient(engine(model_folder, variant)) - expected).norm() < 1e-5 * expected.norm()


def test_parts_that_are_micro_batches_give_the_bits_of_the_whole(model_folder: Path) -> None:
    whole, parts = (engine(model_folder, suite.Variant(True, 64)) for _ in range(2))
    for step in range(2):
        batch, objective = suite.ragged_batch(seed=step), suite.OBJECTIVES[1]
        expected, counts = suite.update(whole, batch, objective), objective.counts(batch.columns())
        passes = parts.passes(batch.columns(), objective.block)
        assert len(passes) > 2
        measured = Metrics()
        for rows in passes:
            measured.merge(parts.forward_backward(batch[rows], objective, counts))
        measured.merge(parts.step())
        assert measured.reduce() == expected.reduce()
    assert torch.equal(suite.weights_of(parts), suite.weights_of(whole))


def test_a_step_without_gradients_moves_nothing(model_folder: Path) -> None:
    of = engine(model_folder, suite.Variant(True, 64))
    suite.update(of, suite.ragged_batch(), suite.OBJECTIVES[1])
    before = suite.weights_of(of)
    assert of.step().reduce() == {"actor/empty_updates": 1.0}
    assert torch.equal(suite.weights_of(of), before)


def test_gradient_equals_a_plain_backward_pass(model_folder: Path) -> None:
    """Token-mean cross-entropy by transformers' own loss, tokens that are not to be learnt labelled -100."""
    batch = suite.ragged_batch()
    of = engine(model_folder, suite.Variant(True, 64))
    measured = suite.update(of, batch, ImitationObjective()).reduce()
    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="eager")
    width = batch["response_mask"].shape[1]
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, -width:] = torch.where(batch["response_mask"] == 1, batch["input_ids"][:, -width:], -100)
    kept = batch["response_mask"].any(1)
    loss = plain(
        batch["input_ids"][kept],
        attention_mask=batch["attention_mask"][kept],
        position_ids=batch["position_ids"][kept],
        labels=labels[kept],
    ).loss
    loss.backward()
    assert measured["sft/loss"] == pytest.approx(loss.item(), abs=1e-5)
    for (name, ours), theirs in zip(of.model.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm() + 1e-7, name


def test_loss_is_what_the_formula_says(model_folder: Path) -> None:
    """One micro-batch: -A (ratio clipped at .8, 1.2), mean over tokens, from log-probs that another pass gave."""
    batch, of = suite.ragged_batch(), engine(model_folder, suite.Variant(True, 10**6))
    log_probs = of.forward(batch, frozenset({"log_probs"}))["log_probs"]
    ratio, advantages = (log_probs - batch["old_log_probs"]).exp(), batch["advantages"]
    per_token = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)) * batch["response_mask"]
    measured = suite.update(of, batch, suite.OBJECTIVES[0]).reduce()
    assert measured["actor/pg_loss"] == pytest.approx((per_token.sum() / batch["response_mask"].sum()).item(), abs=1e-6)


def test_without_a_token_that_counts_nothing_moves(model_folder: Path) -> None:
    of, batch = engine(model_folder, suite.Variant(True, 64)), suite.ragged_batch()
    before = suite.weights_of(of)
    measured = suite.update(
        of, batch.with_columns(response_mask=torch.zeros_like(batch["response_mask"])), suite.OBJECTIVES[0]
    ).reduce()
    assert measured == {"actor/empty_updates": 1.0}
    assert torch.equal(suite.weights_of(of), before)


def test_gradient_is_clipped_and_its_norm_before_that_is_told(model_folder: Path) -> None:
    loose, tight = (engine(model_folder, suite.Variant(True, 64)) for _ in range(2))
    tight.grad_clip = 1e-3
    free = suite.update(loose, suite.ragged_batch(), ImitationObjective()).reduce()["sft/grad_norm"]
    assert suite.update(tight, suite.ragged_batch(), ImitationObjective()).reduce()["sft/grad_norm"] == pytest.approx(
        free, rel=1e-6
    )
    grads = [p.grad for p in tight.model.parameters() if p.grad is not None]
    assert torch.stack([g.norm() for g in grads]).norm().item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_resumes_to_the_same_bits(name: Literal["adamw", "muon"], model_folder: Path) -> None:
    optim = OptimConfig(name=name, lr=1e-3, schedule="cosine", warmup_steps=2)
    straight, stopped, resumed = (engine(model_folder, suite.Variant(True, 64), optim) for _ in range(3))
    for step in range(4):
        suite.update(straight, suite.ragged_batch(seed=step), suite.OBJECTIVES[0])
    for step in range(2):
        suite.update(stopped, suite.ragged_batch(seed=step), suite.OBJECTIVES[0])
    resumed.load_state(stopped.state())
    for step in range(2, 4):
        suite.update(resumed, suite.ragged_batch(seed=step), suite.OBJECTIVES[0])
    assert torch.equal(suite.weights_of(straight), suite.weights_of(resumed))


def test_a_model_that_is_only_read_cannot_be_updated(model_folder: Path) -> None:
    with raises(EngineError, "optimizer", found=None):
        suite.update(engine(model_folder, suite.Variant(True, 64), None), suite.ragged_batch(), ImitationObjective())


def test_state_of_another_model_is_refused(model_folder: Path, qwen25_folder: Path) -> None:
    of, other = engine(model_folder, suite.Variant(True, 64)), engine(qwen25_folder, suite.Variant(True, 64))
    with raises(EngineError, re.compile("^state")):
        of.load_state(other.state())


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(model_folder: Path) -> None:
    of = engine(model_folder, suite.Variant(True, 64))
    exact = of.forward(suite.ragged_batch(), frozenset({"log_probs"}))["log_probs"]
    of.forward_settings = ForwardSettings(dtype=torch.bfloat16)
    rounded = of.forward(suite.ragged_batch(), frozenset({"log_probs"}))["log_probs"]
    suite.update(of, suite.ragged_batch(), PolicyObjective("reinforce"))
    assert all(
        p.dtype == torch.float32 and p.grad is not None and p.grad.dtype == torch.float32 for p in of.model.parameters()
    )
    assert 0 < (exact - rounded).abs().max() < 0.1


class Wave(SingleEngine):
    """All forward passes, then all backward passes from the last to the first, as a pipeline has it."""

    def schedule(self, columns: Any, objective: Any, counts: Any, metrics: Metrics) -> torch.Tensor:
        losses = []
        for rows in self.passes(columns, objective.block):
            part = {name: column[rows] for name, column in columns.items()}
            loss, measured = objective.loss(self.outputs(part, objective.needs, objective.temperature), part, counts)
            losses.append(loss)
            metrics.merge(measured)
        for loss in reversed(losses):
            loss.backward()
        return torch.stack(losses).detach().sum()


@pytest.mark.slow
def test_a_pipeline_is_another_schedule(model_folder: Path) -> None:
    """Counts before, clipping, step and metrics after it are the base's."""
    plain, wave = (
        kind(RoleSettings(str(model_folder), EngineConfig(), "float32", 64, OPTIM)) for kind in (SingleEngine, Wave)
    )
    suite.check_update(plain, wave, suite.OBJECTIVES[1])
    empty = suite.ragged_batch().with_columns(response_mask=torch.zeros(12, 20, dtype=torch.int64))
    assert suite.update(wave, empty, suite.OBJECTIVES[1]).reduce() == {"actor/empty_updates": 1.0}
