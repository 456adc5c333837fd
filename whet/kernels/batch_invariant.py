# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant modules: a token's results do not depend on the other tokens of the batch. Matrix products and norms
use kernels with a fixed tile shape in sampling and in training. Weights are bfloat16, the residual stream is float32.

torch computes only elementwise operations. They are not compiled: fusion would change where values are rounded."""

from __future__ import annotations

import torch
from torch import nn

from whet.kernels.bfloat16_copies import NarrowLinear
from whet.kernels.fused import RMSNorm, gradients
from whet.kernels.linear import FastLinear

DTYPE = torch.bfloat16


class FixedLinear(NarrowLinear):
    """A linear layer whose matrix product uses tiles of a fixed shape."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # torch's name
        """Computes the layer: [..., in] -> [..., out]."""
        weight, bias = (self.weight, self.bias) if self.narrow is None else self.narrow
        typed_bias = None if bias is None else bias.to(DTYPE)
        out: torch.Tensor = _Product.apply(input.to(DTYPE), weight.to(DTYPE), typed_bias)
        return out


class FixedRMSNorm(RMSNorm):
    """RMSNorm that processes rows in tiles of a fixed shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the norm: [..., H] -> [..., H]."""
        out: torch.Tensor = _Norm.apply(x, self.weight, self.eps)
        return out


class FixedEmbedding(nn.Embedding):
    """An embedding whose rows are rounded to bfloat16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """Looks up embeddings: [...] -> [..., H] float32."""
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
