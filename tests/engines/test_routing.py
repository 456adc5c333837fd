# SPDX-License-Identifier: Apache-2.0
"""The routers' auxiliary loss against transformers' own, and the metrics of routers worked by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

sys.path.insert(0, str(Path(__file__).parent))
import engine_conformance as suite

from tests.first import first
from tests.models.nano import nano_model
from whet.config.schema import EngineConfig, OptimConfig
from whet.engines.role import RoleSettings
from whet.engines.single import SingleEngine
from whet.trainers.objectives import ImitationObjective

FACTOR = 0.7
KINDS = [["mixtral", {}], ["minimax", {}], ["gpt_oss", {}]]  # of the own way and, the second, of the general one


@pytest.fixture(scope="module", params=first(1, KINDS, others=pytest.mark.slow), ids=lambda kind: kind[0])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, changed = request.param
    asks = {"output_router_logits": True, "router_aux_loss_coef": FACTOR, **changed}
    return nano_model(tmp_path_factory.mktemp("nano") / "model", model_type, **asks)


def engine_of(folder: Path, variant: suite.Variant, **options: bool) -> SingleEngine:
    packing = None if variant.packing else False
    settings = EngineConfig(packing=packing), "float32", variant.max_tokens_per_micro_batch, OptimConfig(lr=1e-3)
    return SingleEngine(RoleSettings(str(folder), *settings, **options))


def gradient(engine: SingleEngine, batch: suite.Batch | None = None) -> tuple[torch.Tensor, dict[str, float]]:
    metrics = engine.forward_backward(suite.ragged_batch() if batch is None else batch, ImitationObjective())
    parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in engine.model.parameters()]
    return torch.cat([part.flatten() for part in parts]), metrics.reduce()


def states_that_predict(batch: suite.Batch) -> torch.Tensor:
    """1 for the tokens before a sampled one, which nothing but padding of failed rows follows.  [B, L]"""
    sampled = torch.zeros_like(batch["input_ids"])
    sampled[:, -batch["response_mask"].shape[1] :] = batch["response_mask"]
    return sampled.roll(-1, 1)


def test_loss_and_gradient_are_those_of_transformers(folder: Path) -> None:
    """One forward over all rows, its routers weighed by the states that the loss reads."""
    batch = suite.ragged_batch()
    found, metrics = gradient(engine_of(folder, suite.Variant(True, 10**6)))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reads = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    out, mask = plain(**reads, output_router_logits=True, use_cache=False), states_that_predict(batch)
    config = plain.config
    auxiliary = load_balancing_loss_func(out.router_logits, 4, config.num_experts_per_tok, mask)
    log_probs = out.logits[:, :-1].log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
    (-(log_probs * mask[:, :-1]).sum() / mask.sum() + FACTOR * auxiliary).backward()
    assert metrics["sft/router_aux_loss"] == pytest.approx(FACTOR * auxiliary.item(), rel=1e-5)
    own = dict(engine_of(folder, suite.Variant(True, 10**6)).model.named_parameters())
    start = 0
    for name, weight in own.items():
        theirs = plain.get_parameter(name).grad
        ours, start = found[start : start + weight.numel()], start + weight.numel()
        expected = torch.zeros_like(ours) if theirs is None else theirs.flatten()
        assert (ours - expected).norm() <= 2e-5 * expected.norm() + 1e-6, name


@pytest.mark.parametrize("variant", first(2, suite.VARIANTS[1:], others=pytest.mark.slow))
def test_any_split_has_the_same_gradient_and_numbers(variant: suite.Variant, folder: Path) -> None:
    expected, metrics = gradient(engine_of(folder, suite.VARIANTS[0]))
    found, others = gradient(engine_of(folder, variant))
    assert (found - expected).norm() < 1e-5 * expected.norm()
    for name in ("sft/router_aux_loss", "sft/router_load", "sft/router_entropy"):
        assert others[name] == pytest.approx(metrics[name], rel=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_an_example_of_weight_2_counts_like_two_examples(scale: float, folder: Path) -> None:
    """Also to the auxiliary loss, which no common factor of all weights changes."""
    batch, twice = suite.ragged_batch(), torch.arange(0, len(suite.ragged_batch()), 2)
    weights = torch.ones(len(batch))
    weights[twice] = 2.0
    found, metrics = gradient(engine_of(folder, suite.VARIANTS[0]), batch.with_columns(example_weights=weights * scale))
    copies = batch[[*range(len(batch)), *twice.tolist()]]
    expected, others = gradient(engine_of(folder, suite.VARIANTS[0]), copies)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert metrics["sft/router_aux_loss"] == pytest.approx(others["sft/router_aux_loss"], rel=1e-5)


def test_gradient_checkpointing_changes_nothing(folder: Path) -> None:
    expected, _ = gradient(engine_of(folder, suite.VARIANTS[0]))
    found, _ = gradient(engine_of(folder, suite.VARIANTS[0], gradient_checkpointing=True))
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_load_and_entropy_are_those_of_transformers_router_logits(folder: Path) -> None:
    batch = suite.ragged_batch()
    _, metrics = gradient(engine_of(folder, suite.Variant(True, 64)))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    reads = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        routers = plain(**reads, output_router_logits=True, use_cache=False).router_logits
    at = states_that_predict(batch).flatten().bool()
    loads, entropies = [], []
    for logits in routers:
        kept = logits.flatten(0, -2)[at].log_softmax(-1)
        counts = kept.topk(plain.config.num_experts_per_tok).indices.flatten().bincount(minlength=4)
        loads.append(counts.max() / counts.float().mean())
        entropies.append(-(kept.exp() * kept).sum(-1).mean())
    assert metrics["sft/router_load"] == pytest.approx(max(loads).item(), rel=1e-5)
    assert metrics["sft/router_entropy"] == pytest.approx(torch.stack(entropies).mean().item(), rel=1e-5)


def test_a_model_that_does_not_ask_for_the_loss_has_none(tmp_path: Path) -> None:
    engine = engine_of(nano_model(tmp_path / "model", "mixtral"), suite.VARIANTS[0])
    _, metrics = gradient(engine)
    assert "sft/router_aux_loss" not in metrics
    assert 1.0 <= metrics["sft/router_load"] <= 4.0


RANKS = {
    "single": EngineConfig(logits_chunk_tokens=16),
    "fsdp": EngineConfig(name="fsdp", logits_chunk_tokens=16),
    "experts": EngineConfig(name="fsdp", logits_chunk_tokens=16, options={"mesh": {"expert": 2}}),
    "context": EngineConfig(name="fsdp", logits_chunk_tokens=16, options={"mesh": {"context": 2}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mixtral", "minimax", "deepseek_v3"])
def test_two_ranks_take_the_steps_of_one(model_type: str, tmp_path: Path) -> None:
    """Of the own way and the general one, with the auxiliary loss; a sharded state has the buffers of routers."""
    asks = {"output_router_logits": True, "router_aux_loss_coef": FACTOR}
    folder = nano_model(tmp_path / "model", model_type, **asks)
    reference = suite.drive(suite.launched({"actor": suite.settings(folder)}, 1)["actor"], steps=range(6))
    assert reference.metrics[0]["actor/router_aux_loss"] > 0
    kinds = {name: each for name, each in RANKS.items() if not each.options or model_type == "mixtral"}
    groups = suite.launched({name: suite.settings(folder, each) for name, each in kinds.items()}, 2)
    for group in groups.values():
        suite.check_records(reference, suite.drive(group, steps=range(6)))
    suite.check_continues(groups["fsdp"], tmp_path / "state", range(6, 8))
    groups["fsdp"].close()
