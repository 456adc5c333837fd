# SPDX-License-Identifier: Apache-2.0
"""Replacement of a model's RMS norms and gated MLPs by versions that save less memory for the backward pass.

A module is replaced only if it computes the same: its parts have the expected names, and a small copy with random
weights (its own may not be loaded yet) agrees on random rows. Weights keep their names.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from whet.models.rms_norm import RMSNorm

TOLERANCE = 1e-5  # relative, in float32
WIDTH = 8  # of the copies for the comparison


class GatedMLP(nn.Module):
    """The layer down(silu(gate(x)) * up(x))."""

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
    """Replaces the suitable modules of `model`.  Returns their number."""
    replaced = 0
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            other = _counterpart(module)
            if other is not None and _same(module):
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
def _same(module: nn.Module) -> bool:
    """True where small copies of the module and its counterpart, with random weights, agree on a few random rows."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        small = copy.copy(module)
        small._parameters = {name: nn.Parameter(torch.rand(WIDTH)) for name in module._parameters}
        small._modules = {name: _small_linear(name, part) for name, part in module._modules.items()}
        rows = torch.randn(4, WIDTH)
        other = _counterpart(small)
        assert other is not None
        try:
            expected, got = small(rows), other(rows)
        except RuntimeError:  # its computation needs its own width
            return False
        return bool((got - expected).norm() <= TOLERANCE * expected.norm())


def _small_linear(name: str, part: nn.Module | None) -> nn.Module | None:
    if not isinstance(part, nn.Linear):
        return part
    sizes = (2 * WIDTH, WIDTH) if name == "down_proj" else (WIDTH, 2 * WIDTH)
    return nn.Linear(*sizes, bias=part.bias is not None)


class _SiluGate(torch.autograd.Function):
    """silu(gate) up; saves gate and up, but not silu(gate)."""

    @staticmethod
    def forward(ctx, gate: torch.Tensor, up: torch.Tensor):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
