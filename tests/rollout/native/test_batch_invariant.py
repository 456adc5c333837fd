# SPDX-License-Identifier: Apache-2.0
"""`batch_invariant` by Triton's interpreter and a stand-in for the device: a request has the same bits alone, among
others and in other orders, and the trainer has its log-probs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.workers.card_invariant import batch_of
from tests.engines.engine_conformance import update
from tests.kernels.interpreted import exact_products
from tests.raising import raises
from tests.rollout.standin import install
from whet.config import TrainConfig, load_config
from whet.config.schema import EngineConfig, LoraConfig, OptimConfig
from whet.engines.role import RoleSettings
from whet.engines.single import SingleEngine
from whet.errors import ConfigError, EngineError
from whet.kernels import batch_invariant_triton
from whet.keyed import key
from whet.models.load import load_policy
from whet.plugins.lessons.init_model import init_model
from whet.rollout.native import columns, engine, scheduler
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Completion, Request, SamplingParams, generate
from whet.trainers.objectives import PolicyObjective
from whet.weight_sync.buckets import in_dtype

pytestmark = pytest.mark.skipif(not batch_invariant_triton.INTERPRETED, reason="needs Triton's interpreter")
LOG_PROBS = frozenset({"log_probs"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("models") / "small"
    return init_model(where, "qwen3", "nano", alphabet="0123456789", num_layers=2, max_position_embeddings=64)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that is quick for small batches."""
    install(monkeypatch, interpreted=True)
    exact_products(monkeypatch)
    monkeypatch.setattr(engine, "SIZES", (32, 64))
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", 64)
    monkeypatch.setattr(columns, "FINE_STEP", 4)


def trainer(folder: Path, **given: Any) -> SingleEngine:
    role = RoleSettings(str(folder), EngineConfig(), "bfloat16", None, OptimConfig(lr=1e-3), 1.0, batch_invariant=True)
    return SingleEngine(replace(role, **given))


def sampler(of: SingleEngine, rows: int = 8) -> NativeEngine:
    """An engine with a copy of the trainer's weights."""
    engine, module = NativeEngine(torch.bfloat16, rows, kv_cache_bytes=2**20, batch_invariant=True), of.whole_module()
    assert module is not None
    engine.adopt(module)
    return engine


def requests(**params: Any) -> list[Request]:
    """Three prompts, one of them with two samples, one of one token."""
    prompts = [(5, 6, 7, 8, 9, 10, 11, 4, 3, 12, 5, 9, 8, 7, 6, 5, 4, 11, 9), (4,), (5, 6, 7, 8, 9), (5, 6, 7, 8, 9)]
    return [
        Request(str(row), prompt, SamplingParams(max_new_tokens=2 + row % 3, **params), key(0, "test", row))
        for row, prompt in enumerate(prompts)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "alone"), [({}, [0, 3]), ({"temperature": 0.7, "top_p": 0.9}, [1])], ids=["plain", "cut"]
)
def test_a_request_has_the_same_bits_in_any_company(
    folder: Path, card: None, params: dict[str, Any], alone: list[int]
) -> None:
    of, made = trainer(folder), requests(**params)
    together = generate(sampler(of), made)
    assert len({each.token_ids for each in together}) == 4
    assert [generate(sampler(of), [made[row]])[0] for row in alone] == [together[row] for row in alone]
    few = sampler(of, rows=2)
    assert generate(few, made[::-1]) == together[::-1]
    resumed = replace(made[2], uid="resumed", sampled_ids=together[2].token_ids[:2])
    [rest] = generate(few, [resumed])
    assert (rest.token_ids, rest.log_probs) == (together[2].token_ids[2:], together[2].log_probs[2:])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainer_has_the_log_probs_of_the_rollout(folder: Path, card: None, temperature: float) -> None:
    """Before and after an update, with shared prompts and without, in one micro-batch and in several."""
    of, made = trainer(folder), requests(temperature=temperature)
    engine = sampler(of)
    objective = PolicyObjective("ppo_clip", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": None})
    for version in range(2):
        done = generate(engine, made)
        batch = batch_of(made, done)
        for given in ({}, {"engine": EngineConfig(share_prompts=False), "max_tokens_per_micro_batch": 24}):
            other = trainer(folder, **given)
            other.model.load_state_dict(of.model.state_dict())
            own = other.forward(batch, LOG_PROBS, temperature)["log_probs"]
            assert torch.equal(own, batch["rollout_log_probs"]) and bool(own.any())
        before = [weight.clone() for weight in of.model.parameters()]
        update(of, batch, replace(objective, temperature=temperature))
        assert any(not torch.equal(a, b) for a, b in zip(before, of.model.parameters(), strict=True))
        engine.load(((name, in_dtype(weight, torch.bfloat16)) for name, weight in of.named_weights()), version + 1)


@pytest.mark.slow
def test_the_gradient_is_that_of_other_kernels(folder: Path, card: None) -> None:
    made = requests()
    batch = batch_of(
        made, [Completion((5, 7, 9, 4)[: 2 + row], (-1.0,) * (2 + min(row, 2)), "length", ()) for row in range(4)]
    )
    found = []
    for is_fixed in (True, False):
        of = trainer(folder, batch_invariant=is_fixed, grad_clip=None)
        update(
            of,
            batch,
            PolicyObjective("ppo_clip", {"clip_ratio_low": 1.0, "clip_ratio_high": 1e6, "clip_ratio_c": None}),
        )
        found.append(torch.cat([w.grad.flatten().float() for w in of.model.parameters() if w.grad is not None]))
    assert (found[0] - found[1]).norm() < 0.03 * found[1].norm()  # bfloat16


@pytest.mark.parametrize(
    ("arch", "given", "names"),
    [
        ("qwen3", {"dtype": "float32"}, ["float32", "bfloat16"]),
        ("gemma", {}, ["Gemma3TextScaledWordEmbedding"]),
        ("qwen3_moe", {}, ["Qwen3MoeExperts"]),
        ("gemma2", {}, ["cap of logits"]),
        ("qwen3", {"lora": LoraConfig(rank=2)}, ["adapter"]),
        ("qwen3", {"engine": EngineConfig(packing=False)}, ["actor.engine.packing"]),
    ],
)
def test_what_cannot_be_is_named(arch: str, given: dict[str, Any], names: Sequence[str], tmp_path: Path) -> None:
    where = init_model(tmp_path / "model", arch, "nano", alphabet="0123456789", num_layers=1)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"batch_invariant") as error:
        trainer(where, **given)
    assert all(name in str(error.value) for name in names)


def test_an_engine_names_it_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(EngineError, key="rollout.engine.options.compile", found=True):
        NativeEngine(torch.bfloat16, compile=True, batch_invariant=True)
    monkeypatch.delenv("TRITON_INTERPRET")
    engine = NativeEngine(torch.bfloat16, batch_invariant=True)
    with raises(EngineError, found=re.compile("cpu")):
        engine.attach(load_policy(folder), 0)
    base = {"model.path": str(folder), "rollout.engine.options": {"batch_invariant": True}, "model.dtype": "bfloat16"}
    load_config(TrainConfig, None, base, given={"reward", "data"})
    with raises(ConfigError, "actor.engine.name", found="fsdp"):
        load_config(TrainConfig, None, {**base, "actor.engine.name": "fsdp"}, given={"reward", "data"})
