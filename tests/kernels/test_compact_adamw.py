# SPDX-License-Identifier: Apache-2.0
"""Moments in 2 bytes and in 1 against torch's AdamW."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
import engine_conformance as suite
from test_single import engine

from tests.raising import raises
from whet.config import TrainConfig, load_config
from whet.config.schema import OptimConfig
from whet.engines.optim import optimizer_for
from whet.errors import ConfigError
from whet.kernels import compact_adamw
from whet.kernels.compact_adamw import BLOCK, HALF, Blocks, Draws, RankPart, _codes, round_at_random
from whet.keyed import key
from whet.models.outputs import ForwardSettings
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


@pytest.mark.parametrize(("state_dtype", "bytes_per_weight", "bound"), [("bfloat16", 4.0, 0.02), ("int8", 2.3, 0.1)])
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
    values, blocks, state = torch.randn(3, 2 * BLOCK + 10, generator=draw), Blocks(), dict[str, torch.Tensor]()
    blocks.start(state, values)
    assert not blocks.read(state, "exp_avg", slice(0, 3)).any()
    for at in (slice(0, 2), slice(2, 3)):
        blocks.write(state, "exp_avg", at, values[at], None)
    got = blocks.read(state, "exp_avg", slice(0, 3))
    assert state["exp_avg_scale"].shape == (3, 3)
    scale = state["exp_avg_scale"].repeat_interleave(BLOCK, dim=1)[:, : values.shape[1]]
    assert ((got - values).abs() <= 0.008 * scale).all()  # half a step of the widest decade, and the end
    small = torch.full((1, BLOCK), 1e-20)
    small[0, :2] = torch.tensor([1.0, 0.0])
    blocks.start(state, small)
    blocks.write(state, "exp_avg_sq", slice(0, 1), small, None)
    got = blocks.read(state, "exp_avg_sq", slice(0, 1))[0]
    assert got[0] == 1 and got[1] == 0 and (got[2:] > 0).all()


def test_rounding_at_random_keeps_the_mean() -> None:
    """1 + 1/1024 lies an eighth of the way between two bfloat16 numbers: to nearest it would never be left. And a
    number that lies at f between two goes up f times as often as it is rounded, as nearly as chance has it."""
    weight, at = torch.zeros(200, 200), slice(0, 200)
    rounded = round_at_random(torch.full((200, 200), 1 + 1 / 1024), Draws(7, RankPart.of(weight)).upper(at))
    assert set(rounded.flatten().tolist()) == {1.0, 1 + 1 / 128}
    assert rounded.mean().item() == pytest.approx(1 + 1 / 1024, abs=5e-5)
    values = torch.rand(200, 200, generator=torch.Generator().manual_seed(0)) * 2 - 1
    below = round_at_random(values, torch.zeros(200, 200, dtype=torch.int32))
    above = round_at_random(values, torch.full((200, 200), HALF - 1, dtype=torch.int32))
    f = ((values - below) / (above - below)).nan_to_num(0.0)
    for bits in (Draws.lower, Draws.upper):
        draws = [Draws(key(0, "optimizer", 0, step), RankPart.of(weight)) for step in range(64)]
        ups = torch.stack([round_at_random(values, bits(each, at)) == above for each in draws]).float().mean(0)
        between = (f > 0.1) & (f < 0.9)
        z = (ups - f)[between] / (f * (1 - f) / 64)[between].sqrt()
        assert abs(float(z.mean())) < 0.02 and float(z.std()) == pytest.approx(1, abs=0.02)


def test_numbers_that_are_none_are_not_rounded_to_one() -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert torch.equal(
        round_at_random(values, torch.full((3,), HALF - 1, dtype=torch.int32)).nan_to_num(3.0), values.nan_to_num(3.0)
    )


def test_random_bits_are_evenly_spread_and_differ_by_key_and_place() -> None:
    whole = torch.zeros(512, 256)
    drawn = [Draws(key(0, "optimizer", place, step), RankPart.of(whole)) for place in range(2) for step in range(2)]
    for half in (Draws.lower, Draws.upper):
        bits = torch.stack([half(each, slice(0, 512)).flatten() for each in drawn]).double() / HALF
        assert ((bits.mean(1) - 0.5).abs() < 4 * (1 / 12 / 2**17) ** 0.5).all()
        assert ((bits.var(1) - 1 / 12).abs() < 1e-3).all()
        neighbours = torch.stack([*bits, bits[0].roll(1), bits[0].roll(256)])
        assert (torch.corrcoef(neighbours) - torch.eye(6)).abs().max() < 0.02


def test_a_part_draws_what_the_whole_draws_there() -> None:
    weight = torch.zeros(30, 20)
    whole = Draws(11, RankPart.of(weight)).upper(slice(0, 30))
    part = Draws(11, RankPart(weight[10:22, 5:12], 10, 5, 20))
    assert torch.equal(part.upper(slice(0, 12)), whole[10:22, 5:12])
    assert torch.equal(part.upper(slice(3, 7)), whole[13:17, 5:12])


# -- weights in bfloat16 ----------------------------------------------------------------------------------------------


def fitted(rounding: Literal["stochastic", "kahan"] | None, dtype: torch.dtype, steps: int = 400) -> float:
    """The error after fitting a matrix to another, by steps of a hundredth of bfloat16's resolution."""
    draw = torch.Generator().manual_seed(0)
    target = 1 + 0.05 * torch.randn(64, 64, generator=draw)
    weight = nn.Parameter(torch.ones(64, 64, dtype=dtype))
    settings = OptimConfig(lr=5e-4, weight_decay=0.0, weight_rounding=rounding)
    optimizer = optimizer_for(nn.ParameterList([weight]), settings)
    weight.grad_dtype = None
    for _ in range(steps):
        grad = weight.detach().float() - target
        weight.grad = grad if rounding is not None else grad.to(dtype)  # torch's own takes no other
        optimizer.step()
    return float((weight.detach().float() - target).norm() / (1 - target).norm())


def test_weights_in_bfloat16_learn_where_rounding_to_nearest_stands_still() -> None:
    """Steps of 5e-4 beside weights of about 1, which bfloat16 has 1/128 apart above and 1/256 below."""
    assert fitted(None, torch.float32) < 0.06
    assert fitted(None, torch.bfloat16) == 1.0
    assert fitted("stochastic", torch.bfloat16) < 0.12
    assert fitted("kahan", torch.bfloat16) < 0.09


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_weights_in_bfloat16_resume_to_the_same_bits(
    rounding: Literal["stochastic", "kahan"], model_folder: Path
) -> None:
    optim = OptimConfig(lr=1e-3, weight_rounding=rounding, state_dtype="bfloat16")
    made = [engine(model_folder, suite.Variant(True, 64), optim) for _ in range(3)]
    for each in made:
        each.forward_settings = ForwardSettings(dtype=torch.bfloat16)
    straight, stopped, resumed = made
    for step in range(4):
        suite.update(straight, suite.ragged_batch(seed=step), ImitationObjective())
    for step in range(2):
        suite.update(stopped, suite.ragged_batch(seed=step), ImitationObjective())
    resumed.load_state(stopped.state())
    for step in range(2, 4):
        suite.update(resumed, suite.ragged_batch(seed=step), ImitationObjective())
    assert torch.equal(suite.weights_of(straight), suite.weights_of(resumed))
    assert all(p.dtype == torch.bfloat16 for p in resumed.model.parameters())
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in resumed.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_state_resumes_to_the_same_bits(state_dtype: Kept, model_folder: Path) -> None:
    optim = OptimConfig(lr=1e-3, schedule="cosine", state_dtype=state_dtype)
    straight, stopped, resumed = (engine(model_folder, suite.Variant(True, 64), optim) for _ in range(3))
    for step in range(4):
        suite.update(straight, suite.ragged_batch(seed=step), ImitationObjective())
    for step in range(2):
        suite.update(stopped, suite.ragged_batch(seed=step), ImitationObjective())
    resumed.load_state(stopped.state())
    for step in range(2, 4):
        suite.update(resumed, suite.ragged_batch(seed=step), ImitationObjective())
    assert torch.equal(suite.weights_of(straight), suite.weights_of(resumed))
    dtypes = {value.dtype for each in resumed.state()["optimizer"]["state"].values() for value in each.values()}
    assert dtypes == {torch.float32, {"bfloat16": torch.bfloat16, "int8": torch.uint8}[state_dtype]}


def test_only_adamw_has_it(model_folder: Path) -> None:
    overrides = {"model.path": str(model_folder), "actor.optim.name": "muon", "actor.optim.state_dtype": "int8"}
    with raises(ConfigError, "actor.optim.state_dtype", found="int8", expected=re.compile("actor.optim.name=muon")):
        load_config(TrainConfig, None, overrides, given={"reward", "data"})
