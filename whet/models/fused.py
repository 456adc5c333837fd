# SPDX-License-Identifier: Apache-2.0
"""RMS norm and gated MLP that keep less for the backward pass than autograd would, in place of a model's own.

A module is replaced only where it is shown to compute the same: by its parts' names and on random numbers. Weights keep
their names.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

TOLERANCE = 1e-5  # relative, in float32


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, normalised in float32."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]. Under autocast float32 states come out as the matrix product after them reads them."""
        if torch.is_grad_enabled():
            out: torch.Tensor = _RMSNorm.apply(x, self.weight, self.eps)
            return out
        return _rms_norm(x, self.weight, self.eps)[0]


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gate_proj: nn.Linear, up_proj: nn.Linear, down_proj: nn.Linear) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        gated = _SiluGate.apply(gate, up) if torch.is_grad_enabled() else F.silu(gate).mul_(up)
        out: torch.Tensor = self.down_proj(gated)
        return out


def fuse(model: nn.Module) -> int:
    """Replaces what can be replaced in `model`; how many modules were."""
    replaced = 0
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            other = _counterpart(module)
            if other is not None and _same(module, other):
                setattr(parent, name, other.train(module.training))
                replaced += 1
    return replaced


def _counterpart(module: nn.Module) -> nn.Module | None:
    weights, parts = dict(module.named_parameters()), dict(module.named_children())
    eps = getattr(module, "variance_epsilon", None)
    if not parts and weights.keys() == {"weight"} and weights["weight"].dim() == 1 and isinstance(eps, float):
        return RMSNorm(weights["weight"], eps)
    if parts.keys() == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        linear = [parts[name] for name in ("gate_proj", "up_proj", "down_proj")]
        if all(isinstance(part, nn.Linear) for part in linear):
            return GatedMLP(*linear)  # type: ignore[arg-type]
    return None


@torch.no_grad()
def _same(module: nn.Module, other: nn.Module) -> bool:
    """Whether both give the same for a few random rows."""
    weight = next(module.parameters())
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(4, weight.shape[-1], generator=draw).to(weight)
    expected, got = module(rows), other(rows)
    return bool((got - expected).norm() <= TOLERANCE * expected.norm())


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The result [..., H], and 1 / sqrt(mean(x^2) + eps) [..., 1]."""
    wide = _at_least_float32(x)
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    out = (wide * scale).to(x.dtype) * weight
    device = x.device.type
    narrow = x.dtype == torch.float32 and torch.is_autocast_enabled(device)
    return (out.to(torch.get_autocast_dtype(device)) if narrow else out), scale


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number a row."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float):  # type: ignore[no-untyped-def]
        out, scale = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        """With u = x scale and g = grad weight: d x = scale (g - u mean(g u)), d weight = sum of grad u over rows."""
        x, weight, scale = ctx.saved_tensors
        unit, grad = _at_least_float32(x) * scale, _at_least_float32(grad)
        grad_weight = (grad * unit).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        grad = grad * weight
        along = (grad * unit).mean(-1, keepdim=True)
        return unit.mul_(along).neg_().add_(grad).mul_(scale).to(x.dtype), grad_weight, None


class _SiluGate(torch.autograd.Function):
    """silu(gate) up; keeps both and not silu(gate)."""

    @staticmethod
    def forward(ctx, gate: torch.Tensor, up: torch.Tensor):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
