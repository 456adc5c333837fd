# SPDX-License-Identifier: Apache-2.0
"""RMS norm that saves only x and one number per row for its gradient: in C++ on a CPU, else in torch."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from whet.compiled import library

KERNEL_DTYPES = (torch.float32, torch.bfloat16)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, normalised in float32."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]. Under autocast the result of float32 states has autocast's dtype."""
        if torch.is_grad_enabled():
            out: torch.Tensor = _RMSNorm.apply(x, self.weight, self.eps)
            return out
        return normalise(x, self.weight, self.eps)[0]


def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the normalised states [..., H], and 1 / sqrt(mean(x^2) + eps) [..., 1]."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    if not _has_kernel(x, weight):
        return reference(x, weight, eps, dtype)
    x, weight = x.contiguous(), weight.contiguous()
    out, scale = x.new_empty(x.shape, dtype=dtype), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    _kernel("whet_rms_norm")(*_narrow(x, weight, out), *_at(x, weight, out, scale), *_sizes(x), eps)
    return out, scale


def reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`normalise` in torch. Like transformers, it rounds the normalised rows to x's dtype before the product."""
    wide = _at_least_float32(x)
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return ((wide * scale).to(x.dtype) * weight).to(dtype), scale


def gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of x and of the weight; `scale` comes from `normalise`.

    With u = x scale and g = grad weight: d x = scale (g - u mean(g u)), d weight = sum of grad u over rows.
    """
    if not _has_kernel(x, weight, grad):
        return reference_gradients(grad, x, weight, scale)
    x, weight, grad = x.contiguous(), weight.contiguous(), grad.contiguous()
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight, dtype=torch.float32)
    _kernel("whet_rms_norm_backward")(
        *_narrow(x, weight, grad), *_at(grad, x, weight, scale, grad_x, grad_weight), *_sizes(x)
    )
    return grad_x, grad_weight.to(weight.dtype)


def reference_gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gradients` in torch."""
    unit, grad = _at_least_float32(x) * scale, _at_least_float32(grad)
    grad_weight = (grad * unit).flatten(0, -2).sum(0)
    grad = grad * weight
    along = (grad * unit).mean(-1, keepdim=True)
    return unit.mul_(along).neg_().add_(grad).mul_(scale).to(x.dtype), grad_weight.to(weight.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float):  # type: ignore[no-untyped-def]
        out, scale = normalise(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        x, weight, scale = ctx.saved_tensors
        return *gradients(grad, x, weight, scale), None


def _has_kernel(*tensors: torch.Tensor) -> bool:
    """True where the C++ kernel can run: not under torch.compile, which fuses the formula, nor on fake tensors."""
    suited = all(each.device.type == "cpu" and each.dtype in KERNEL_DTYPES for each in tensors)
    suited = suited and not any(isinstance(each, FakeTensor) for each in tensors)
    return suited and not torch.compiler.is_compiling() and library(_SOURCE) is not None


_SOURCE = Path(__file__).with_suffix(".cpp")


@cache
def _kernel(name: str) -> ctypes._NamedFuncPointer:  # type: ignore[name-defined]
    compiled = library(_SOURCE)
    assert compiled is not None
    flags, sizes = [ctypes.c_int] * 3, [ctypes.c_int64] * 2
    function = compiled[name]
    function.restype = None
    function.argtypes = (
        [*flags, *[ctypes.c_void_p] * 4, *sizes, ctypes.c_float]
        if name == "whet_rms_norm"
        else [*flags, *[ctypes.c_void_p] * 6, *sizes]
    )
    return function


def _narrow(*tensors: torch.Tensor) -> list[int]:
    return [int(each.dtype == torch.bfloat16) for each in tensors]


def _at(*tensors: torch.Tensor) -> list[int]:
    return [each.data_ptr() for each in tensors]


def _sizes(x: torch.Tensor) -> tuple[int, int]:
    """Rows and width."""
    return x.numel() // max(1, x.shape[-1]), x.shape[-1]


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
