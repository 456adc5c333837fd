# SPDX-License-Identifier: Apache-2.0
"""Modules whose numbers for a token do not depend on the batch: products, norms and embeddings by kernels with tiles of
one shape, with weights in bfloat16 and a residual stream in float32.

What is left to torch works on each number alone. It is not compiled: fused, numbers would be rounded elsewhere.
"""

from __future__ import annotations

import torch
from torch import nn

from whet.kernels.bfloat16_copies import NarrowLinear
from whet.kernels.fused import RMSNorm, gradients
from whet.kernels.linear import FastLinear

DTYPE = torch.bfloat16


class FixedLinear(NarrowLinear):
    """A linear layer whose product has tiles of one shape."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
        """[..., in] -> [..., out]."""
        weight, bias = (self.weight, self.bias) if self.narrow is None else self.narrow
        typed_bias = None if bias is None else bias.to(DTYPE)
        out: torch.Tensor = _Product.apply(input.to(DTYPE), weight.to(DTYPE), typed_bias)
        return out


class FixedRMSNorm(RMSNorm):
    """RMSNorm with rows in tiles of one shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        out: torch.Tensor = _Norm.apply(x, self.weight, self.eps)
        return out


class FixedEmbedding(nn.Embedding):
    """An embedding that rounds its rows to bfloat16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """[...] -> [..., H] float32."""
        return super().forward(input).to(DTYPE).float()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):  # type: ignore[no-untyped-def]
        from whet.kernels import batch_invariant_triton

        ctx.save_for_backward(x, weight)
        return batch_invariant_triton.product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_weight = rows.T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad @ weight, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float):  # type: ignore[no-untyped-def]
        from whet.kernels import batch_invariant_triton

        out, scale = batch_invariant_triton.normalise(x, weight.to(DTYPE), eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        return *gradients(grad, *ctx.saved_tensors), None


FIXED = {nn.Embedding: FixedEmbedding, RMSNorm: FixedRMSNorm}
FIXED |= dict.fromkeys((nn.Linear, FastLinear, NarrowLinear), FixedLinear)
