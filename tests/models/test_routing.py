# SPDX-License-Identifier: Apache-2.0
"""Routing: recorded while a rollout samples, replayed by the trainer."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import engine_conformance as suite

from tests.raising import raises
from whet.batch import Batch
from whet.config.schema import EngineConfig, OptimConfig
from whet.engines.role import RoleSettings
from whet.engines.single import SingleEngine
from whet.errors import EngineError
from whet.models.load import layers, load_policy, recompute_activations
from whet.models.outputs import ForwardSettings, layout_of, model_outputs
from whet.models.routing import as_bytes, as_column, recording, replay
from whet.plugins.lessons.init_model import init_model
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Completion, Request, SamplingParams, generate

log = logging.getLogger(__name__)
ALPHABET = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz<>"
SETTINGS = ForwardSettings(replays=True)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight experts in each of two layers, two of which compute a token."""
    folder = tmp_path_factory.mktemp("models") / "mixture"
    sizes = {"num_layers": 2, "max_position_embeddings": 512}
    return init_model(folder, "qwen3_moe", "nano", alphabet=ALPHABET, **sizes)


@pytest.fixture
def model(mixture: Path) -> PreTrainedModel:
    loaded = load_policy(mixture)
    replay(layers(loaded))
    return loaded


def test_rows_of_a_column() -> None:
    chosen = [torch.tensor([[1, 2], [3, 0], [5, 6]]), torch.tensor([[0, 7], [4, 2], [1, 1]])]
    first, second = as_bytes(chosen, torch.tensor([0, 2]))
    assert np.frombuffer(first, np.int16).tolist() == [2, 1, 2, 0, 7]
    column = as_column([[b"", first], [second]], 3)
    assert column is not None and column.shape == (2, 3, 2, 2)
    assert column[0].tolist() == [[[-1, -1]] * 2, [[1, 2], [0, 7]], [[-1, -1]] * 2]
    assert column[1, 0].tolist() == [[5, 6], [1, 1]]
    assert as_column([[b""], []], 1) is None


@pytest.mark.parametrize("packing", [True, False])
def test_own_choices_replayed_change_nothing_and_others_are_those_that_are_given(
    packing: bool, model: PreTrainedModel
) -> None:
    batch, needs, settings = (
        suite.ragged_batch(),
        frozenset({"log_probs"}),
        ForwardSettings(packing=packing, replays=True),
    )
    columns = batch.columns()
    expected = model_outputs(model, columns, needs, settings)["log_probs"]
    none = torch.full((*batch["response_mask"].shape, 2, 2), -1, dtype=torch.int16)
    with recording(model) as own:
        assert torch.equal(
            model_outputs(model, {**columns, "routed_experts": none}, needs, settings)["log_probs"], expected
        )
    given = torch.arange(8).expand(*none.shape[:2], 8)[..., 2:6].reshape(none.shape).short()
    with recording(model) as chosen:
        changed = model_outputs(model, {**columns, "routed_experts": given}, needs, settings)["log_probs"]
    assert (changed - expected).abs().max() > 1e-4
    replayed = [torch.tensor([2, 3]), torch.tensor([4, 5])]
    for layer, want in enumerate(replayed):
        forced = (chosen[layer] == want).all(1)
        assert int(forced.sum()) >= int(batch["response_mask"].any(1).sum())
        assert not (own[layer] == want).all(1)[forced].all()
    changed.sum().backward()
    assert all(each.grad is not None for name, each in model.named_parameters() if ".gate." in name)


def test_checkpointed_activations_are_computed_again_with_the_same_experts(mixture: Path) -> None:
    """Gradients equal gradients without checkpointing, after a batch without experts too."""
    columns, gradients = suite.ragged_batch().columns(), list[dict[str, torch.Tensor]]()
    shape = (*columns["response_mask"].shape, 2, 2)
    given = torch.arange(8).expand(*shape[:2], 8)[..., 2:6].reshape(shape).short()
    for is_checkpointed in (False, True):
        model = load_policy(mixture).train()
        if is_checkpointed:
            recompute_activations(model)
        replay(layers(model))
        for more in ({"routed_experts": given}, {}):
            model_outputs(model, {**columns, **more}, frozenset({"log_probs"}), SETTINGS)["log_probs"].sum().backward()
            gradients.append(
                {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
            )
            model.zero_grad()
    for expected, found in zip(gradients[:2], gradients[2:], strict=True):
        torch.testing.assert_close(found, expected)
    assert any(not torch.equal(gradients[0][name], each) for name, each in gradients[1].items())


def sampled(engine: NativeEngine, groups: int = 4) -> tuple[list[Request], list[Completion]]:
    draw = torch.Generator().manual_seed(5)
    prompts = [tuple(torch.randint(3, 40, (6 + group,), generator=draw).tolist()) for group in range(groups)]
    params = SamplingParams(max_new_tokens=24)
    made = [
        Request(f"{n}", prompt, params, key=n) for n, prompt in enumerate(each for each in prompts for _ in range(4))
    ]
    return made, list(generate(engine, made))


def as_batch(made: Sequence[Request], found: Sequence[Completion]) -> Batch:
    prompt, width = max(len(each.prompt_ids) for each in made), max(len(each.token_ids) for each in found)
    ids, mask = torch.zeros(len(made), prompt + width, dtype=torch.long), torch.zeros(len(made), prompt + width)
    log_probs = torch.zeros(len(made), width)
    for row, (request, each) in enumerate(zip(made, found, strict=True)):
        start, end = prompt - len(request.prompt_ids), prompt + len(each.token_ids)
        ids[row, start:end] = torch.tensor([*request.prompt_ids, *each.token_ids])
        mask[row, start:end], log_probs[row, : len(each.token_ids)] = 1, torch.tensor(each.log_probs)
    routed = as_column([each.routed for each in found], width)
    assert routed is not None
    return Batch.of(
        {
            "input_ids": ids,
            "attention_mask": mask.long(),
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0).long(),
            "response_mask": mask[:, prompt:].long(),
            "rollout_log_probs": log_probs,
            "routed_experts": routed,
        }
    )


def test_the_rollout_tells_the_experts_of_each_token(mixture: Path, model: PreTrainedModel) -> None:
    """The experts equal the choices of the trainer's own routers, as both compute in float32."""
    engine = NativeEngine(torch.float32, routed_experts=True)
    engine.attach(model, 1)
    made, found = sampled(engine)
    assert all(len(each.routed) == len(each.token_ids) for each in found)
    batch, needs = as_batch(made, found), frozenset({"log_probs"})
    plain = {name: column for name, column in batch.columns().items() if name != "routed_experts"}
    for columns in (batch.columns(), plain):
        got = model_outputs(model, columns, needs, SETTINGS)["log_probs"]
        torch.testing.assert_close(got, batch["rollout_log_probs"], atol=2e-5, rtol=0)
    with recording(model) as own:
        model_outputs(model, plain, needs, SETTINGS)
    where = layout_of(batch.columns(), SETTINGS, needs)
    assert where.routed is not None
    for layer, chosen in enumerate(own):
        theirs = where.routed[:, layer]
        known = theirs[:, 0] >= 0
        assert torch.equal(chosen[: len(known)][known].sort(1)[0], theirs[known].long().sort(1)[0])
    engine.close()


def test_a_dense_model_has_no_routing(model_folder: Path) -> None:
    engine = NativeEngine(torch.float32, routed_experts=True)
    with raises(EngineError, "rollout.engine.options.routed_experts", found=True):
        engine.attach(load_policy(model_folder), 1)


@pytest.mark.slow
def test_the_gap_of_log_probs_after_fifty_steps(mixture: Path, tmp_path: Path) -> None:
    """The rollout samples in bfloat16, the trainer computes in float32. With 64 experts most tokens have other
    log-probs where the trainer's routers choose themselves, as one before them has other experts; replay makes the gap
    smaller."""
    config = AutoConfig.from_pretrained(mixture)
    sizes = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 32, "num_hidden_layers": 4}
    for name, value in {**sizes, "initializer_range": 0.1}.items():
        setattr(config, name, value)
    wide = Path(shutil.copytree(mixture, tmp_path / "wide"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(wide)
    optim = OptimConfig(lr=3e-3)
    trainer = SingleEngine(
        RoleSettings(str(wide), EngineConfig(logits_chunk_tokens=64), "float32", 4096, optim, total_steps=50)
    )
    for step in range(50):
        suite.update(trainer, suite.ragged_batch(seed=step), suite.OBJECTIVES[3])
    engine = NativeEngine(torch.bfloat16, routed_experts=True)
    engine.adopt(load_policy(wide))
    engine.load(trainer.named_weights(), 1)
    batch, needs = as_batch(*sampled(engine, groups=16)), frozenset({"log_probs"})
    none = batch.with_columns(routed_experts=torch.full_like(batch["routed_experts"], -1))
    with_replay, without = (
        (trainer.forward(each, needs)["log_probs"] - batch["rollout_log_probs"]).abs() for each in (batch, none)
    )
    mask, differs = batch["response_mask"].bool(), (with_replay != without) & batch["response_mask"].bool()
    log.info("%d of %d tokens have other experts", differs.sum(), mask.sum())
    for name, chosen in (("all tokens", mask), ("tokens with other experts", differs)):
        gaps = [float(each[chosen].mean()) for each in (with_replay, without)]
        log.info("%s: mean gap %.2e with replay, %.2e without", name, *gaps)
        assert gaps[0] < gaps[1], (name, gaps)
