# SPDX-License-Identifier: Apache-2.0
"""The kernel of compact moments, by Triton's interpreter, against the loop in torch."""

import logging
import os

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from tests.first import first
from whet import devices
from whet.kernels import compact_adamw, compact_adamw_triton
from whet.kernels.bfloat16_copies import NarrowCopies, NarrowLinear
from whet.kernels.compact_adamw import BLOCK, CompactAdamW, Draws, RankPart, Rounded, Work

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
SHAPES = (20, 300), (5, 30), (3, 4, 400), (70,)  # rows with a short last block, small ones, three axes, a vector


def trained(state_dtype: str, rounding: str | None, dtype: torch.dtype, steps: int = 2) -> CompactAdamW:
    """An optimizer after a few steps, of which the small matrix has missed one."""
    draw = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in SHAPES]
    groups = [{"params": weights[:3], "weight_decay": 0.1}, {"params": weights[3:], "weight_decay": 0.0}]
    given = {"state_dtype": state_dtype, "weight_rounding": rounding, "seed": 3}
    optimizer = CompactAdamW(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-8, **given)  # type: ignore[arg-type]
    for step in range(steps):
        for number, weight in enumerate(weights):
            weight.grad_dtype = torch.float32
            grad = torch.randn(weight.shape, generator=draw) * 0.1
            weight.grad = None if (step, number) == (0, 1) else grad.T.contiguous().T if grad.dim() == 2 else grad
        optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("state_dtype", "rounding", "dtype"),
    first(
        1,
        [
            ("int8", "stochastic", torch.bfloat16),
            ("bfloat16", "kahan", torch.bfloat16),
            ("bfloat16", None, torch.float32),
            ("float32", "stochastic", torch.bfloat16),
            ("int8", None, torch.float32),
        ],
        others=pytest.mark.slow,
    ),
)
def test_the_kernel_takes_the_steps_of_the_loop(
    state_dtype: str, rounding: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products and sums may be fused: float32 values differ in the last bits, and values rounded at random or to a code
    hardly ever."""
    looped = trained(state_dtype, rounding, dtype)
    launches, plain = list[int](), compact_adamw_triton.step
    monkeypatch.setattr(compact_adamw, "runs_triton", lambda *_: True)
    monkeypatch.setattr(
        compact_adamw_triton, "step", lambda work, *rest: (launches.append(len(work)), plain(work, *rest))
    )
    monkeypatch.setattr(compact_adamw_triton, "MOST", 3)
    got = trained(state_dtype, rounding, dtype)
    # int8 leaves a matrix and a vector that are small in float32; the small matrix has no gradient at first
    assert launches == ([2, 1, 2, 2] if state_dtype == "int8" else [3, 4])
    weights = ([weight for group in each.param_groups for weight in group["params"]] for each in (looped, got))
    for weight, other in zip(*weights, strict=True):
        kept, found = looped.state[weight], got.state[other]
        assert kept.keys() == found.keys() and kept["step"] == found["step"]
        for a, b in [(weight.detach(), other.detach()), *((kept[name], found[name]) for name in kept)]:
            assert a.dtype == b.dtype
            if a.dtype == torch.float32:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-7)
            else:
                assert (a != b).float().mean() < 0.003


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_bfloat16_copies_follow_the_weights_that_the_kernel_writes(
    state_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compact_adamw, "runs_triton", lambda *_: True)
    box = nn.Sequential(nn.Linear(64, 64))
    copies = NarrowCopies([box])
    [linear] = box.children()
    groups = [{"params": list(box.parameters())}]
    optimizer = CompactAdamW(groups, lr=0.1, betas=(0.9, 0.99), eps=1e-8, state_dtype=state_dtype)  # type: ignore[arg-type]
    for _ in range(2):
        with copies.used():
            box(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        before = box[0].weight.detach().clone()
        optimizer.step()
        with copies.used():
            assert isinstance(linear, NarrowLinear) and linear.narrow is not None
            for weight, narrow in zip(linear.parameters(), linear.narrow, strict=True):
                assert narrow is not None and narrow.equal(weight.bfloat16()) and not weight.equal(before)


def test_a_part_of_a_weight_is_rounded_as_in_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)
    start, grad = torch.randn(30, 20, generator=draw).bfloat16(), torch.randn(30, 20, generator=draw)
    factors = 0.1, 0.999, 0.001, 0.001**0.5, 1e-8, 1.0, -0.01

    def after(rows: slice, columns: slice) -> tuple[torch.Tensor, ...]:
        own, codec, state = start[rows, columns].clone(), Rounded(), dict[str, torch.Tensor]()
        codec.start(state, own)
        draws = Draws(2**45 + 11, RankPart(own, rows.start, columns.start, 20))
        work = Work(own, grad[rows, columns].clone(), codec, state, draws, factors)
        compact_adamw_triton.step([work], [torch.zeros(1)] * 4, "stochastic", BLOCK)
        return own, state["exp_avg_sq"]

    whole, part = after(slice(0, 30), slice(0, 20)), after(slice(10, 22), slice(5, 12))
    for one, other in zip(whole, part, strict=True):
        assert torch.equal(one[10:22, 5:12], other) and not torch.equal(one[9:21, 5:12], other)


def test_an_accelerator_without_triton_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING):
        found = [devices.runs_triton(torch.device(kind), "slower") for kind in ("cpu", "cuda", "cuda", "mps", "cuda")]
    assert found == [False] * 5 and len(caplog.records) == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
