# SPDX-License-Identifier: Apache-2.0
"""A model whose results for a token do not depend on the batch: products, norms, attention and head run in kernels with
tiles of one shape, the same for sampling and training, with weights in bfloat16 and a residual stream in float32.

The remaining operations of torch work on each number alone. They are not compiled, since fusion would change the
rounding."""

from __future__ import annotations

import os

import torch
from torch import nn
from transformers import PreTrainedModel

from whet.devices import runs_triton
from whet.errors import EngineError
from whet.models.attention import LONGEST_HEAD
from whet.models.caches import head_size, key_value_heads
from whet.models.encoders.load import encoders_of
from whet.models.fused import RMSNorm, gradients
from whet.models.linear import FastLinear
from whet.models.log_probs import LogitForm
from whet.models.lora import adapted_layers
from whet.models.narrow import NarrowLinear
from whet.models.packing import tile_tokens

DTYPE = torch.bfloat16
KEY = "rollout.engine.options.batch_invariant"


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
        from whet.models import fixed_kernels

        ctx.save_for_backward(x, weight)
        return fixed_kernels.product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_weight = rows.T @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
        return grad @ weight, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float):  # type: ignore[no-untyped-def]
        from whet.models import fixed_kernels

        out, scale = fixed_kernels.normalise(x, weight.to(DTYPE), eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        return *gradients(grad, *ctx.saved_tensors), None


FIXED = {nn.Embedding: FixedEmbedding, RMSNorm: FixedRMSNorm}
FIXED |= dict.fromkeys((nn.Linear, FastLinear, NarrowLinear), FixedLinear)


def fix_tiles(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> int:
    """Replaces the modules of a model that have weights by their counterparts in this file; weights and names stay.
    Returns the tokens of a tile of attention.  Raises: EngineError naming a part without a counterpart."""
    if problem := _problem(model, device, dtype):
        raise EngineError(f"{KEY}=true", problem, "", "unset it")
    for module in model.modules():
        module.__class__ = FIXED.get(type(module), type(module))
    config = model.config.get_text_config()
    return tile_tokens(config.num_attention_heads, key_value_heads(config))


def _problem(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> str:
    """Names the property that excludes a model from this form; empty if there is none."""
    config, kind = model.config.get_text_config(), type(model).__name__
    if os.environ.get("TRITON_INTERPRET") != "1" and not runs_triton(device, f"{KEY} cannot be"):
        return f"needs an accelerator for which Triton compiles, and the model is on {device}"
    if dtype != DTYPE:
        return f"computes in bfloat16, and model.dtype is {str(dtype).removeprefix('torch.')}"
    if adapted_layers(model):
        return "trains whole models: a rollout adds an adapter to the weights, and rounds other numbers"
    if encoders_of(model) is not None:
        return f"is for models of text, and {kind} sees"
    if LogitForm.of(config) != LogitForm() or config.to_dict().get("attn_logit_softcapping"):
        return f"knows no scale or cap of logits and scores, and {kind} has one"
    if (size := head_size(config)) > LONGEST_HEAD or size % 8:
        return f"is for heads of at most {LONGEST_HEAD} numbers, a multiple of 8, and those of {kind} have {size}"
    for name, module in model.named_modules():
        if module._parameters and type(module) not in {*FIXED, *FIXED.values()}:
            return f"has no kernel with fixed tiles for {type(module).__name__} ({name} of {kind})"
    return ""
