# SPDX-License-Identifier: Apache-2.0
"""RMS norm and gated MLP that keep less for the backward pass than autograd would, in place of a model's own.

A module is replaced only where it is shown to compute the same: by its parts' names and on random numbers. Weights keep
their names.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from whet.models.rms_norm import RMSNorm

TOLERANCE = 1e-5  # relative, in float32


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


def fuse(model: nn.Module, *, shown: bool = True) -> int:
    """Replaces what can be replaced in `model`; how many modules were. A model without numbers cannot be `shown` to
    compute the same: there names decide."""
    replaced = 0
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            other = _counterpart(module)
            if other is not None and (not shown or _same(module, other)):
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
