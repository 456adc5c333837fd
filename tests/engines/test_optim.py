# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import engine_conformance as suite

from tests.first import first
from tests.pictures import seeing_folder
from tests.raising import raises
from whet.config.schema import EngineConfig, OptimConfig
from whet.engines.engine import Engine
from whet.engines.fsdp.engine import FSDPEngine
from whet.engines.optim import Together, inner_matrices, learning_rate, optimizer_for, optimizers_of
from whet.engines.role import RoleSettings
from whet.engines.single import SingleEngine
from whet.errors import CheckpointError
from whet.models.load import ValueModel, load_policy
from whet.plugins.lessons.init_model import Arch


def test_warmup_then_constant() -> None:
    settings = OptimConfig(lr=0.4, warmup_steps=4)
    assert [learning_rate(settings, step, 10) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_linear_ends_where_it_should() -> None:
    settings = OptimConfig(lr=1.0, schedule="linear", warmup_steps=1, min_lr_ratio=0.1)
    # steps 1..5 go from 1 to 0.1 in four equal parts
    assert [learning_rate(settings, step, 6) for step in range(6)] == pytest.approx([1, 1, 0.775, 0.55, 0.325, 0.1])


def test_cosine_is_half_way_in_the_middle() -> None:
    settings = OptimConfig(lr=2.0, schedule="cosine")
    assert [learning_rate(settings, step, 5) for step in (0, 2, 4, 9)] == pytest.approx([2.0, 1.0, 0.0, 0.0])


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = optimizer_for(model, OptimConfig(lr=1.0, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    # without a gradient AdamW only decays: w -= lr * decay * w
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old * (0.5 if old.dim() == 2 else 1.0))


def test_muon_has_the_matrices_between_embedding_and_output(model_folder: Path) -> None:
    model = load_policy(model_folder)
    layers = [f"model.layers.{number}" for number in range(model.config.num_hidden_layers)]
    parts = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
    expected = {f"{layer}.{part}.weight" for layer in layers for part in parts}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in inner_matrices(model)} == expected
    # The head that values are read from maps to one number: no direction of it is worth as much as another.
    assert {names[id(p)] for p in inner_matrices(ValueModel(model))} == expected


@pytest.mark.parametrize("arch", ["qwen2_vl", "qwen2.5_vl", "qwen3_vl", "smolvlm"])
def test_muon_has_the_matrices_of_a_vision_tower(tmp_path: Path, arch: Arch) -> None:
    model = load_policy(seeing_folder(tmp_path / arch, arch))
    inner = {id(parameter) for parameter in inner_matrices(model)}
    left = {name for name, p in model.named_parameters() if id(p) not in inner and p.dim() > 1}
    assert 2 <= len(left) <= 3 and all("embed" in name for name in left)  # of tokens, patches and positions


def test_muon_steps_by_an_orthogonal_matrix_of_adamws_size() -> None:
    """All singular values become about 1, times 0.2 sqrt(longer side) lr; a vector steps by Adam's lr."""
    model = nn.Sequential(nn.Linear(3, 4))
    optimizer = optimizer_for(model, OptimConfig(name="muon", lr=0.1, weight_decay=0.0))
    draw = torch.Generator().manual_seed(0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    optimizer.step()
    weight, bias = (new.detach() - old for new, old in zip(model.parameters(), before, strict=True))
    left, values, right = torch.linalg.svd(grads[0], full_matrices=False)
    steps = (left.T @ weight @ right.T) / -(0.1 * 0.2 * 4**0.5)
    assert ((steps.diagonal() > 0.6) & (steps.diagonal() < 1.3)).all()  # Newton-Schulz does not converge, by design
    assert values.max() > 2 * values.min()
    torch.testing.assert_close(steps - steps.diagonal().diag(), torch.zeros(3, 3), atol=0.05, rtol=0)
    torch.testing.assert_close(bias, -0.1 * grads[1].sign())


def test_several_optimizers_as_one_resume() -> None:
    start = [torch.ones(4, 3), torch.ones(4), torch.ones(4), torch.ones(4)]
    _, straight = steps_of_muon(range(4), {}, start)
    state, half = steps_of_muon(range(2), {}, start)
    _, resumed = steps_of_muon(range(2, 4), state, half)
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def steps_of_muon(
    steps: range, state: dict[str, Any], start: list[torch.Tensor]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The optimizer's state and the parameters after steps along random gradients, each step's its own."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    for parameter, value in zip(model.parameters(), start, strict=True):
        parameter.data.copy_(value)
    optimizer = optimizer_for(model, OptimConfig(name="muon", lr=0.1))
    assert isinstance(optimizer, Together)
    if state:
        optimizer.load_state_dict(state)
    for step in steps:
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        optimizer.step()
    return optimizer.state_dict(), [parameter.detach().clone() for parameter in model.parameters()]


def test_muon_with_frozen_layers_leaves_the_rest_to_adamw() -> None:
    model = nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.LayerNorm(4))
    optimizer = optimizer_for(model, OptimConfig(name="muon", lr=0.1, weight_decay=0.0))
    model(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(model[1].weight.detach(), 1 - 0.1 * model[1].weight.grad.sign())


def engine_of(kind: type[Engine], folder: Path, **optim: Any) -> Any:
    return kind(RoleSettings(str(folder), EngineConfig(), "bfloat16", optim=OptimConfig(lr=1e-3, **optim)))


FORMS: tuple[dict[str, Any], ...] = (
    {},
    {"state_dtype": "bfloat16"},
    {"state_dtype": "int8"},
    {"weight_rounding": "stochastic"},
    {"weight_rounding": "kahan", "state_dtype": "int8"},
    {"name": "muon"},
)


@pytest.mark.parametrize("kind", first(1, [SingleEngine, FSDPEngine], others=pytest.mark.slow))
@pytest.mark.parametrize("is_older", first(1, [False, True], others=pytest.mark.slow))
def test_a_state_of_another_optimizer_is_refused_and_the_own_is_not(
    kind: type[Engine], is_older: bool, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = kind._progress

    def without_a_form(self: Engine) -> dict[str, Any]:
        return {name: value for name, value in progress(self).items() if name != "optim"}

    readers = [engine_of(kind, model_folder, **form) for form in FORMS]
    before = suite.weights_of(readers[0])
    for number, form in enumerate(FORMS):
        writer, path = engine_of(kind, model_folder, **form), tmp_path / f"{number}"
        suite.update(writer, suite.ragged_batch()[:4], suite.OBJECTIVES[0])
        with monkeypatch.context() as patch:
            if is_older:
                patch.setattr(kind, "_progress", without_a_form)
            writer.save(path, None)
        for other, reader in zip(FORMS, readers, strict=True):
            if other != form:
                full, saved = ({"name": "adamw", "state_dtype": "float32", **each} for each in (other, form))
                key = next(key for key in ("name", "state_dtype", "weight_rounding") if full.get(key) != saved.get(key))
                expected = re.compile(re.escape(str(saved.get(key, "no value"))))
                with raises(CheckpointError, f"optim.{key}", found=full.get(key), expected=expected):
                    reader.load(path)
        if not number:
            assert torch.equal(suite.weights_of(readers[1]), before)
    readers[-1].load(path)
    assert torch.equal(suite.weights_of(readers[-1]), suite.weights_of(writer))


@pytest.mark.parametrize("kind", first(1, [SingleEngine, FSDPEngine], others=pytest.mark.slow))
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_resumed_run_has_its_own_hyperparameters(
    kind: type[Engine], name: str, model_folder: Path, tmp_path: Path
) -> None:
    first = engine_of(kind, model_folder, name=name)
    suite.update(first, suite.ragged_batch()[:4], suite.OBJECTIVES[0])
    first.save(tmp_path / "state", None)
    changed = {"weight_decay": 0.5, "betas": (0.8, 0.95), "eps": 1e-6, "momentum": 0.5}
    second = engine_of(kind, model_folder, name=name, **changed)
    names = {"lr", *changed}
    expected = [{key: group[key] for key in names & group.keys()} for group in second.optimizer.param_groups]
    second.load(tmp_path / "state")
    found = [{key: group[key] for key in names & group.keys()} for group in second.optimizer.param_groups]
    assert found == expected
    states = [[each.state.values() for each in optimizers_of(engine.optimizer)] for engine in (first, second)]
    for one, other in zip(*([value for state in each for value in state] for each in states), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
