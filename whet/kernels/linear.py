# SPDX-License-Identifier: Apache-2.0
"""Linear layers in float32 by a C++ kernel for AVX2. On processors with AVX2 but without AVX-512, MKL hardly uses more
than one core if a product has few rows.
On AMD processors the results equal MKL's bit by bit. Without the kernel, layers call `F.linear`, the reference."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.compiled import library

MIN_ROWS = 16  # with fewer rows, packing the weight takes longer than the product
PLAIN = (torch.Tensor, nn.Parameter)  # a subclass may be sharded, or have no values


class FastLinear(nn.Linear):
    """nn.Linear with the C++ kernel, if the kernel can run."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # its name in torch
        """Computes the layer: [..., K] -> [..., N]."""
        weight, bias = self.weight, self.bias
        if not _suits(input, weight) or not (bias is None or (type(bias) in PLAIN and bias.dtype == torch.float32)):
            return F.linear(input, weight, bias)
        if torch.is_grad_enabled():
            out: torch.Tensor = _Linear.apply(input, weight, bias)
            return out
        return product(input, weight, bias, is_transposed=True)


def product(
    x: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor | None = None, *, is_transposed: bool
) -> torch.Tensor:
    """Computes x factor + bias: [..., K], [K, N], [N] -> [..., N]. If `is_transposed`, the factor is [N, K]."""
    x, factor = x.contiguous(), factor.contiguous()
    depth, columns = x.shape[-1], factor.shape[0 if is_transposed else 1]
    out = x.new_empty(*x.shape[:-1], columns)
    bias = None if bias is None else bias.contiguous()  # must stay alive during the call
    added = None if bias is None else bias.data_ptr()
    sizes = x.numel() // max(1, depth), depth, columns
    _kernels()[0](x.data_ptr(), factor.data_ptr(), is_transposed, added, out.data_ptr(), *sizes)
    return out


def product_of_columns(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Computes x^T factor, summed over all dimensions but the last: [..., M], [..., N] -> [M, N]."""
    x, factor = x.contiguous(), factor.contiguous()
    rows, columns = x.shape[-1], factor.shape[-1]
    out = x.new_empty(rows, columns)
    _kernels()[1](x.data_ptr(), factor.data_ptr(), out.data_ptr(), rows, x.numel() // max(1, rows), columns)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias, is_transposed=True)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        grad_x = product(grad, weight, is_transposed=False) if ctx.needs_input_grad[0] else None
        grad_weight = product_of_columns(grad, x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None


def _suits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Tells whether the kernel can run. It does not run inside torch's dispatch modes, which would not see the call."""
    return (
        x.dtype == weight.dtype == torch.float32
        and type(x) in PLAIN
        and type(weight) in PLAIN
        and x.is_cpu
        and weight.is_cpu
        and x.numel() >= MIN_ROWS * weight.shape[1]
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and bool(_kernels())
    )


@cache
def _kernels() -> tuple[Any, ...]:
    """Returns the compiled kernels. Empty unless torch uses AVX2 on this processor and a C++ compiler works."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return ()
    if (compiled := library(Path(__file__).with_suffix(".cpp"))) is None:
        return ()
    pointers, sizes = [ctypes.c_void_p] * 2, [ctypes.c_int64] * 3
    compiled.whet_product.argtypes = [*pointers, ctypes.c_int, *pointers, *sizes]
    compiled.whet_product_of_columns.argtypes = [*pointers, ctypes.c_void_p, *sizes]
    for function in (found := (compiled.whet_product, compiled.whet_product_of_columns)):
        function.restype = None
    return found
