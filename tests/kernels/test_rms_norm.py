# SPDX-License-Identifier: Apache-2.0
"""The norm's kernel against its formula in float64 and in torch, alone and among other rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from whet.kernels import fused
from whet.kernels.fused import RMSNorm, gradients, normalise, reference, reference_gradients

F32, BF16 = torch.float32, torch.bfloat16


def random(shape: tuple[int, ...], dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_by_hand() -> None:
    norm = RMSNorm(nn.Parameter(torch.tensor([1.0, 2.0])), eps=0.5)
    # mean of 3^2 and 4^2 is 12.5; with eps 13
    torch.testing.assert_close(norm(torch.tensor([[3.0, 4.0]])), torch.tensor([[3.0, 8.0]]) / 13**0.5)


def test_the_kernel_is_what_ran() -> None:
    assert fused._has_kernel(fused._RMS_NORM, random((2, 3))), (
        "no C++ compiler works here: the tests compare torch with torch"
    )


def test_results_of_a_collective_are_normalised_without_the_kernel() -> None:
    """Such a tensor has no memory of its own: tensor parallelism gives it to norms that follow a split product."""
    x, weight, grad = random((3, 8)), random((8,), seed=1), random((3, 8), seed=2)
    pending, pending_grad = AsyncCollectiveTensor(x.clone()), AsyncCollectiveTensor(grad.clone())
    assert not any(fused._has_kernel(fused._RMS_NORM, *each) for each in ((pending, weight), (x, weight, pending_grad)))
    out, scale = normalise(pending, weight, 1e-6)
    expected, same_scale = normalise(x, weight, 1e-6)
    torch.testing.assert_close(out, expected)
    got, wanted = gradients(pending_grad, x, weight, scale), gradients(grad, x, weight, same_scale)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 32), (300, 128), (0, 8)])
def test_float32_against_float64(shape: tuple[int, ...]) -> None:
    x, weight, grad = random(shape), random(shape[-1:], seed=1), random(shape, seed=2)
    out, scale = normalise(x, weight, 1e-6)
    exact, exact_scale = reference(x.double(), weight.double(), 1e-6, torch.float64)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scale.double(), exact_scale, rtol=1e-5, atol=0)
    got = gradients(grad, x, weight, scale)
    expected = reference_gradients(grad.double(), x.double(), weight.double(), exact_scale)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == F32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-4 if ours.dim() == 1 else 1e-5)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("of_weight", [F32, BF16])
@pytest.mark.parametrize("of_x", [F32, BF16])
def test_every_dtype_rounds_where_torch_does(of_x: torch.dtype, of_weight: torch.dtype, autocast: bool) -> None:
    x, weight = random((40, 24), of_x), random((24,), of_weight, seed=1)
    with torch.autocast("cpu", BF16, enabled=autocast):
        out, scale = normalise(x, weight, 1e-6)
    dtype = BF16 if autocast and of_x == F32 else torch.promote_types(of_x, of_weight)
    expected, _ = reference(x, weight, 1e-6, dtype)
    assert out.dtype == expected.dtype
    if expected.dtype == BF16:  # a sum in another order may round to the neighbour
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-6)
        assert (out == expected).float().mean() > 0.99
    else:
        torch.testing.assert_close(out, expected, rtol=2**-7 if of_x == BF16 else 1e-6, atol=1e-6)
    grad = random((40, 24), out.dtype, seed=2)
    for ours, theirs in zip(
        gradients(grad, x, weight, scale), reference_gradients(grad, x, weight, scale), strict=True
    ):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2**-7 if ours.dtype == BF16 else 1e-4, atol=1e-4)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = random((1000, 96)), random((96,), seed=1)
    together, alone = normalise(x, weight, 1e-6)[0], normalise(x[417:418], weight, 1e-6)[0]
    assert torch.equal(together[417:418], alone)


def test_rows_that_are_not_contiguous() -> None:
    x, weight = random((8, 4, 16)).transpose(0, 1), random((16,), seed=1)
    assert torch.equal(normalise(x, weight, 1e-6)[0], normalise(x.contiguous(), weight, 1e-6)[0])


def test_what_is_not_a_number_stays_none() -> None:
    x = torch.tensor([[1.0, float("nan")], [1.0, 2.0]], dtype=BF16)
    out = normalise(x, torch.ones(2), 1e-6)[0]
    assert out[0].isnan().all() and out[1].isfinite().all()


def test_gradients_by_finite_differences() -> None:
    x, weight = random((3, 5)).double().requires_grad_(), random((5,), seed=1).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, w: fused._RMSNorm.apply(a, w, 1e-3), (x, weight))
