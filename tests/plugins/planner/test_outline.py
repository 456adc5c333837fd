# SPDX-License-Identifier: Apache-2.0
"""A pass on tensors without values counts the same bytes as the pass on real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.config.schema import EngineConfig, LoraConfig, OptimConfig
from whet.controller.worker import Placement
from whet.engines.role import RoleSettings
from whet.models.load import load_policy, load_value_model
from whet.models.outputs import model_outputs
from whet.plugins.lessons.init_model import init_model
from whet.plugins.planner.outline import Outline, RowLength, TensorBytes, columns
from whet.roles.workers import TrainWorker

ROWS = [RowLength(prompt, 20 + prompt, 30) for prompt in (1, 2) for _ in range(3)]


def settings(folder: Path, **changed: object) -> RoleSettings:
    return replace(RoleSettings(str(folder), EngineConfig(), "float32", optim=OptimConfig()), **changed)  # type: ignore[arg-type]


def test_rows_become_a_batch() -> None:
    batch = columns([RowLength(7, 1, 2), RowLength(8, 2, 1)])
    assert batch["input_ids"].tolist() == [[0, 7, 7, 7], [8, 8, 8, 0]]
    assert batch["position_ids"].tolist() == [[0, 0, 1, 2], [0, 1, 2, 2]]
    assert batch["response_mask"].tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize("is_value_model", [False, True])
def test_weights_are_those_of_the_model(qwen25_folder: Path, is_value_model: bool) -> None:
    outline = Outline(settings(qwen25_folder, is_value_model=is_value_model))
    real = (load_value_model if is_value_model else load_policy)(qwen25_folder)
    named = {name: weight.shape for name, weight in outline.model.named_parameters()}
    assert named == {name: weight.shape for name, weight in real.named_parameters()}
    assert outline.weight_bytes == sum(weight.nbytes for weight in real.parameters())


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_compact_states_are_those_of_a_real_step(model_folder: Path, state_dtype: Any) -> None:
    role = settings(model_folder, optim=OptimConfig(state_dtype=state_dtype))
    engine = TrainWorker(Placement("actor"), role).engine
    assert engine.optimizer is not None
    for weight in engine.model.parameters():
        weight.grad = torch.ones_like(weight)
    engine.optimizer.step()
    kept = [value for state in engine.optimizer.state_dict()["state"].values() for value in state.values()]
    assert Outline(role).moment_bytes == sum(value.nbytes for value in kept)


def test_adamw_keeps_two_numbers_a_weight_and_muon_one_of_inner_matrices(model_folder: Path) -> None:
    adamw = Outline(settings(model_folder))
    assert 0 <= adamw.moment_bytes - 2 * adamw.weight_bytes < 8 * len(list(adamw.model.parameters()))  # and step counts
    muon = Outline(settings(model_folder, optim=OptimConfig(name="muon")))
    saved = adamw.moment_bytes - muon.moment_bytes
    assert 0 <= saved - 4 * adamw.layer_weights < 8 * len(list(adamw.model.parameters()))
    assert Outline(settings(model_folder, optim=None)).moment_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "accumulates"),
    [
        ({}, False),
        ({}, True),
        ({"dtype": "bfloat16"}, True),
        ({"gradient_checkpointing": True}, False),
        ({"engine": EngineConfig(packing=False, logits_chunk_tokens=16)}, False),
        ({"is_value_model": True}, False),
        ({"lora": LoraConfig(rank=4), "dtype": "bfloat16"}, True),
        ({"freeze": ("*.layers.0.*",)}, False),
    ],
    ids=["float32", "accumulated", "bfloat16", "recomputed", "padded", "values", "adapter", "frozen"],
)
def test_a_pass_takes_what_it_takes_on_real_tensors(
    model_folder: Path, changed: dict[str, object], accumulates: bool
) -> None:
    role = settings(model_folder, **changed)
    needs = frozenset({"values"} if role.is_value_model else {"log_probs", "entropy"})
    planned = Outline(role).update_bytes(ROWS, needs, accumulates=accumulates)

    model = TrainWorker(Placement("actor"), role).engine.model
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if accumulates and weight.requires_grad else None
    batch = columns(ROWS)
    with TensorBytes() as counted:
        outputs = model_outputs(model, batch, needs, role.forward)
        sum((value.sum() for value in outputs.values()), torch.zeros(())).backward()  # type: ignore[no-untyped-call]
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = sum(weight.nbytes for weight in trained) if accumulates else 0
    assert planned.total() == pytest.approx(counted.peak.total() + gradients, rel=0.05)


@pytest.mark.slow
def test_a_row_of_a_million_tokens_has_no_mask(model_folder: Path) -> None:
    role = settings(model_folder, dtype="bfloat16", engine=EngineConfig(logits_chunk_tokens=2**18))
    role = replace(role, gradient_checkpointing=True)

    def activations(tokens: int) -> int:
        return Outline(role).update_bytes([RowLength(1, 64, tokens - 64)], frozenset({"log_probs"}), accumulates=True)[
            "activations"
        ]

    short, long = activations(2**18), activations(2**20)
    assert long == pytest.approx(4 * short, rel=0.01)  # a mask would have 1 TiB


def test_a_mixture_of_experts_is_taken_to_use_all_alike(tmp_path: Path) -> None:
    """Real tokens choose unevenly, which changes little."""
    folder = init_model(tmp_path / "model", "qwen3_moe", "nano", num_layers=2, max_position_embeddings=512)
    planned = Outline(settings(folder)).update_bytes(ROWS, frozenset({"log_probs"}), accumulates=False)
    model = TrainWorker(Placement("actor"), settings(folder)).engine.model
    with TensorBytes() as counted:
        outputs = model_outputs(model, columns(ROWS), frozenset({"log_probs"}), settings(folder).forward)
        outputs["log_probs"].sum().backward()  # type: ignore[no-untyped-call]
    assert planned.total() == pytest.approx(counted.peak.total(), rel=0.15)


def test_what_a_token_is_multiplied_with(model_folder: Path) -> None:
    """Two layers, hidden 128, intermediate 384, four heads of 32 and two for keys and values."""
    outline = Outline(settings(model_folder))
    heads = 128 * (128 + 64 + 64) + 128 * 128
    assert outline.layer_weights == 2 * (heads + 3 * 128 * 384)
    assert outline.head_weights == outline.config.vocab_size * 128
    assert outline.num_weights > outline.layer_weights + outline.head_weights  # norms; the embedding is tied
