# SPDX-License-Identifier: Apache-2.0
"""Moments in 2 bytes and in 1 against torch's AdamW."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import engine_conformance as suite
from test_single import engine

from whet.config import TrainConfig, load_config
from whet.config.schema import OptimConfig
from whet.engines import compact_adamw
from whet.engines.compact_adamw import BLOCK, Blocks, Rounded, _codes
from whet.engines.optim import optimizer_for
from whet.errors import ConfigError
from whet.trainers.objectives import ImitationObjective

Kept = Literal["float32", "bfloat16", "int8"]


def losses(state_dtype: Kept, steps: int = 120) -> tuple[list[float], int]:
    """Of a small network that learns a fixed function, and the bytes of the optimizer's state."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 16)
    target = torch.randn(32, 32, generator=draw) / 32**0.5
    optimizer = optimizer_for(model, OptimConfig(lr=3e-3, state_dtype=state_dtype))
    seen = []
    for _ in range(steps):
        x = torch.randn(64, 32, generator=draw)
        loss = (model(x) - (x @ target).tanh()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    state = optimizer.state_dict()["state"].values()
    return seen, sum(value.nbytes for each in state for name, value in each.items() if name != "step")


@pytest.mark.parametrize(("state_dtype", "bytes_per_weight", "bound"), [("bfloat16", 4.0, 0.02), ("int8", 2.2, 0.1)])
def test_learns_as_float32_does_in_less_memory(state_dtype: Kept, bytes_per_weight: float, bound: float) -> None:
    exact, whole = losses("float32")
    kept, compact = losses(state_dtype)
    weights = whole / 8
    assert compact <= bytes_per_weight * weights
    assert exact[-1] < 0.1 * exact[0]
    means = [sum(each[-20:]) / 20 for each in (exact, kept)]
    assert abs(means[1] - means[0]) < bound * means[0]


def test_the_first_steps_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step from 0 rounds nothing that is used; several chunks are as one."""
    monkeypatch.setattr(compact_adamw, "CHUNK", 2 * BLOCK)
    draw = torch.Generator().manual_seed(0)
    start, grad = torch.randn(100, 60, generator=draw), torch.randn(100, 60, generator=draw)
    seen = []
    for state_dtype in ("float32", "bfloat16", "int8"):
        weight = nn.Parameter(start.clone())
        model = nn.ParameterList([weight])
        optimizer = optimizer_for(model, OptimConfig(lr=0.1, weight_decay=0.5, state_dtype=state_dtype))
        weight.grad = grad.clone()
        optimizer.step()
        seen.append(weight.detach())
    for other in seen[1:]:
        torch.testing.assert_close(other, seen[0], atol=1e-6, rtol=1e-6)


def test_codes() -> None:
    for signed in (True, False):
        codes = _codes(signed)
        assert len(codes) == len(codes.unique()) == 256 and codes[-1] == 1 and 0 in codes
    assert _codes(False)[1] == pytest.approx(1e-6 * (0.1 + 0.9 / 4))  # the lowest of two in the lowest decade
    assert _codes(True)[0] == pytest.approx(-(1 - 0.9 / 128))


def test_eight_bits_are_near_where_numbers_are_and_never_0_where_they_are_not() -> None:
    draw = torch.Generator().manual_seed(1)
    values, blocks, state = torch.randn(3 * BLOCK + 10, generator=draw), Blocks(), dict[str, torch.Tensor]()
    blocks.start(state, values)
    assert not blocks.read(state, "exp_avg", slice(0, len(values))).any()
    blocks.write(state, "exp_avg", slice(0, len(values)), values, None)
    got = blocks.read(state, "exp_avg", slice(0, len(values)))
    scale = state["exp_avg_scale"].repeat_interleave(BLOCK)[: len(values)]
    assert ((got - values).abs() <= 0.008 * scale).all()  # half a step of the widest decade, and the end
    small = torch.full((BLOCK,), 1e-20)
    small[0], small[1] = 1.0, 0.0
    blocks.write(state, "exp_avg_sq", slice(0, BLOCK), small, None)
    got = blocks.read(state, "exp_avg_sq", slice(0, BLOCK))
    assert got[0] == 1 and got[1] == 0 and (got[2:] > 0).all()


def test_rounding_at_random_keeps_the_mean() -> None:
    """1 + 1/1024 lies an eighth of the way between two bfloat16 numbers: to nearest it would never be left."""
    state = {"v": torch.zeros(40_000, dtype=torch.bfloat16)}
    values = torch.full((40_000,), 1 + 1 / 1024)
    Rounded().write(state, "v", slice(0, 40_000), values, torch.Generator().manual_seed(0))
    assert set(state["v"].tolist()) == {1.0, 1 + 1 / 128}
    assert state["v"].float().mean().item() == pytest.approx(1 + 1 / 1024, abs=5e-5)


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_state_resumes_to_the_same_bits(state_dtype: Kept, model_folder: Path) -> None:
    optim = OptimConfig(lr=1e-3, schedule="cosine", state_dtype=state_dtype)
    straight, stopped, resumed = (engine(model_folder, suite.Variant(True, 64), optim) for _ in range(3))
    for step in range(4):
        straight.update(suite.ragged_batch(seed=step), ImitationObjective())
    for step in range(2):
        stopped.update(suite.ragged_batch(seed=step), ImitationObjective())
    resumed.load_state(stopped.state())
    for step in range(2, 4):
        resumed.update(suite.ragged_batch(seed=step), ImitationObjective())
    assert torch.equal(suite.weights_of(straight), suite.weights_of(resumed))
    dtypes = {value.dtype for each in resumed.state()["optimizer"]["state"].values() for value in each.values()}
    assert dtypes == {torch.float32, {"bfloat16": torch.bfloat16, "int8": torch.uint8}[state_dtype]}


def test_only_adamw_has_it(model_folder: Path) -> None:
    overrides = {"model.path": str(model_folder), "actor.optim.name": "muon", "actor.optim.state_dtype": "int8"}
    with pytest.raises(
        ConfigError, match=r"actor\.optim\.state_dtype=int8 is for adamw, and actor\.optim\.name is muon"
    ):
        load_config(TrainConfig, None, overrides, given={"reward", "data"})
