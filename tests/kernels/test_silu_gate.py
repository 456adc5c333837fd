# SPDX-License-Identifier: Apache-2.0
"""The kernel of the gated MLP against its formula in float64 and in torch, alone and among other numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from whet.kernels import fused
from whet.kernels.fused import silu_gate, silu_gate_gradients

F32, BF16 = torch.float32, torch.bfloat16


def random(shape: tuple[int, ...], dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def exact_gradients(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gate, up = (each.double().requires_grad_() for each in (gate, up))
    return torch.autograd.grad(F.silu(gate) * up, (gate, up), grad.double())


def test_by_hand() -> None:
    # sigmoid(ln 3) = 3 / 4; its slope there is 3 / 16
    gate, up = torch.tensor([0.0, math.log(3)]), torch.tensor([5.0, 4.0])
    torch.testing.assert_close(silu_gate(gate, up), torch.tensor([0.0, 3 * math.log(3)]))
    expected = torch.tensor([2.5, 4 * (0.75 + 3 / 16 * math.log(3))]), torch.tensor([0.0, 0.75 * math.log(3)])
    torch.testing.assert_close(silu_gate_gradients(torch.ones(2), gate, up), expected)


def test_the_kernel_is_what_ran() -> None:
    assert fused._has_kernel(fused._SILU_GATE, random((2, 3))), "no C++ compiler works here"


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 32), (300, 133), (0, 8)])
def test_float32_against_float64(shape: tuple[int, ...]) -> None:
    gate, up, grad = (random(shape, seed=seed) for seed in range(3))
    torch.testing.assert_close(silu_gate(gate, up).double(), F.silu(gate.double()) * up.double(), rtol=5e-7, atol=0)
    of_gate, of_up = silu_gate_gradients(grad, gate, up)
    exact_gate, exact_up = exact_gradients(grad, gate, up)
    torch.testing.assert_close(of_gate.double(), exact_gate, rtol=1e-6, atol=1e-6)  # its terms may cancel
    torch.testing.assert_close(of_up.double(), exact_up, rtol=5e-7, atol=0)


def test_every_gate_that_float32_holds() -> None:
    gate = torch.linspace(-88, 100, 400_001)
    out = silu_gate(gate, torch.ones_like(gate))
    torch.testing.assert_close(out.double(), F.silu(gate.double()), rtol=5e-7, atol=0)
    ends = torch.tensor([math.nan, math.inf, -3e38, 3e38, 0.0, -0.0, 1e-40, -200.0])
    found, expected = silu_gate(ends, torch.ones_like(ends)), F.silu(ends)
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7)) and found[0].isnan()


def test_bfloat16_rounds_where_torch_does() -> None:
    gate, up, grad = (random((40, 1237), BF16, seed) for seed in range(3))
    assert torch.equal(silu_gate(gate, up), F.silu(gate).mul_(up))
    of_gate, of_up = silu_gate_gradients(grad, gate, up)
    assert torch.equal(of_up, F.silu(gate).mul_(grad))
    expected = torch.ops.aten.silu_backward(grad * up, gate)
    torch.testing.assert_close(of_gate, expected, rtol=2**-7, atol=1e-6)
    assert (of_gate == expected).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_number_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    gate, up, grad = (random((1000, 96), dtype, seed) for seed in range(3))
    together = silu_gate(gate, up), *silu_gate_gradients(grad, gate, up)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = (each[417:418, :77] for each in (gate, up, grad))
    own_gate, own_up, own_grad = rows
    alone = silu_gate(own_gate, own_up), *silu_gate_gradients(own_grad, own_gate, own_up)
    torch.set_num_threads(threads)
    for whole, part in zip(together, alone, strict=True):
        assert torch.equal(whole[417:418, :77], part)


def test_without_the_kernel_torch_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, up, grad = (random((7, 9), seed=seed) for seed in range(3))
    mine = silu_gate(gate, up), *silu_gate_gradients(grad, gate, up)
    monkeypatch.setattr(fused, "library", lambda source: None)
    theirs = silu_gate(gate, up), *silu_gate_gradients(grad, gate, up)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    wide = silu_gate(gate.double(), up.double())
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide.float(), mine[0], rtol=1e-6, atol=0)
