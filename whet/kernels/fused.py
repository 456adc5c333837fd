# SPDX-License-Identifier: Apache-2.0
"""Replaces a model's RMS norms and gated MLPs by versions that keep fewer tensors for the backward pass, its linear
layers by layers with a kernel of whet, and the function for rotary positions.

A module is replaced only if its replacement computes the same: its submodules must have the expected names, and small
copies of both with random weights (the model's weights may not be loaded yet) must give the same results. The function
for rotary positions must give the same bits."""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from whet.compiled import library
from whet.kernels.linear import PLAIN, FastLinear

TOLERANCE = 1e-5  # relative, in float32
WIDTH = 8  # of the copies for the comparison
KERNEL_DTYPES = (torch.float32, torch.bfloat16)
ROTATION = "apply_rotary_pos_emb"  # the function for rotary positions, in each file of transformers with such a model
Rotation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class GatedMLP(nn.Module):
    """A gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(self, gate_proj: nn.Linear, up_proj: nn.Linear, down_proj: nn.Linear) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the MLP: [..., H] -> [..., H]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        out: torch.Tensor = self.down_proj((_SiluGate.apply if torch.is_grad_enabled() else silu_gate)(gate, up))
        return out


def fuse(model: nn.Module) -> int:
    """Replaces modules of `model` by counterparts that save memory.  Returns their number.

    The function for rotary positions is replaced in transformers, so for all models of its kind in this process."""
    replaced = 0
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is nn.Linear:
                module.__class__ = FastLinear  # its weight, its names and its hooks stay
            other = _counterpart(module)
            if other is not None and _same(module):
                setattr(parent, name, other.train(module.training))
                replaced += 1
    for place in {sys.modules.get(type(module).__module__) for module in model.modules()} - {None}:
        rotation: Rotation | None = vars(place).get(ROTATION)
        if rotation is not None and not hasattr(rotation, "replaces") and _rotates(rotation):
            setattr(place, ROTATION, _faster(rotation))
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
    """Tells whether small random copies of the module and of its replacement agree on a few random rows."""
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # torch.manual_seed also seeds accelerators, and takes milliseconds
        small = copy.copy(module)
        small._parameters = {name: nn.Parameter(torch.rand(WIDTH)) for name in module._parameters}
        small._modules = {name: _small_linear(name, part) for name, part in module._modules.items()}
        rows = torch.randn(4, WIDTH)
        other = _counterpart(small)
        assert other is not None
        try:
            expected, got = small(rows), other(rows)
        except (RuntimeError, TypeError, AttributeError):  # the module needs another width, or more arguments
            return False
        return bool((got - expected).norm() <= TOLERANCE * expected.norm())


def _small_linear(name: str, part: nn.Module | None) -> nn.Module | None:
    if not isinstance(part, nn.Linear):
        return part
    sizes = (2 * WIDTH, WIDTH) if name == "down_proj" else (WIDTH, 2 * WIDTH)
    return nn.Linear(*sizes, bias=part.bias is not None)


class _SiluGate(torch.autograd.Function):
    """Computes silu(gate) * up. Saves gate and up for the backward pass, but not silu(gate)."""

    @staticmethod
    def forward(ctx, gate: torch.Tensor, up: torch.Tensor):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(gate, up)
        return silu_gate(gate, up)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        return silu_gate_gradients(grad, *ctx.saved_tensors)


def silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up, of equal shapes."""
    if gate.dtype != up.dtype or not _has_kernel(_SILU_GATE, gate, up):
        return reference_silu_gate(gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    _kernel("whet_silu_gate")(*_narrow(gate), *_at(gate, up, out), gate.numel())
    return out


def silu_gate_gradients(grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of gate and up."""
    if not grad.dtype == gate.dtype == up.dtype or not _has_kernel(_SILU_GATE, grad, gate, up):
        return reference_silu_gate_gradients(grad, gate, up)
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    _kernel("whet_silu_gate_backward")(*_narrow(gate), *_at(grad, gate, up, grad_gate, grad_up), gate.numel())
    return grad_gate, grad_up


def reference_silu_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Computes `silu_gate` in plain torch."""
    return F.silu(gate).mul_(up)


def reference_silu_gate_gradients(
    grad: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `silu_gate_gradients` in plain torch."""
    return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class RMSNorm(nn.Module):
    """RMSNorm in float32: x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises [..., H]. Under autocast, float32 states give a result in autocast's dtype."""
        if torch.is_grad_enabled():
            out: torch.Tensor = _RMSNorm.apply(x, self.weight, self.eps)
            return out
        return normalise(x, self.weight, self.eps)[0]


def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the normalised states [..., H], and the scale 1 / sqrt(mean(x^2) + eps) [..., 1]."""
    dtype = x.dtype if x.dtype == weight.dtype else torch.promote_types(x.dtype, weight.dtype)
    if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    if not _has_kernel(_RMS_NORM, x, weight):
        return reference(x, weight, eps, dtype)
    x, weight = x.contiguous(), weight.contiguous()
    out, scale = torch.empty_like(x, dtype=dtype), torch.empty((*x.shape[:-1], 1), dtype=torch.float32)
    _kernel("whet_rms_norm")(*_narrow(x, weight, out), *_at(x, weight, out, scale), *_sizes(x), eps)
    return out, scale


def reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `normalise` in torch. Like transformers, it rounds to x's dtype before it multiplies by the weight."""
    wide = _at_least_float32(x)
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return ((wide * scale).to(x.dtype) * weight).to(dtype), scale


def gradients(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of x and of the weight; `scale` comes from `normalise`.

    With u = x scale and g = grad weight: d x = scale (g - u mean(g u)), d weight = sum of grad u over rows.
    """
    if not _has_kernel(_RMS_NORM, x, weight, grad):
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
    """Computes `gradients` in plain torch."""
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


def reference_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates queries or keys [B, H, T, D] by cos and sin [B, T, D], in plain torch."""
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)


@torch.no_grad()
def _rotates(rotation: Rotation) -> bool:
    """Tells whether a function computes `reference_rotary` of queries and keys, also in the dtype of its results."""
    with torch.device("cpu"):
        draw = torch.Generator().manual_seed(0)
        q, k, cos, sin = (torch.randn(*shape, 8, generator=draw) for shape in ((2, 3, 4), (2, 1, 4), (2, 4), (2, 4)))
        try:
            return all(
                torch.equal(found, reference_rotary(x.to(dtype), cos, sin))
                for dtype in KERNEL_DTYPES
                for x, found in zip((q, k), rotation(q.to(dtype), k.to(dtype), cos, sin), strict=True)
            )
        except (RuntimeError, TypeError, LookupError, ValueError):  # it has other arguments
            return False


def _faster(rotation: Rotation) -> Rotation:
    """Returns the function that runs the kernel where it can, and else calls `rotation`."""

    @wraps(rotation)
    def rotated(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Shapes last: torch.compile, under which no kernel runs, would compile a function that compares them for each.
        tables = cos.dtype == sin.dtype == torch.float32 and not (cos.requires_grad or sin.requires_grad)
        if args or kwargs or not tables or not _has_kernel(_ROTARY, q, k, cos, sin) or not _alike(q, k, cos, sin):
            return rotation(q, k, cos, sin, *args, **kwargs)
        rotate = _Rotary.apply if torch.is_grad_enabled() else rotary
        return rotate(q, cos, sin), rotate(k, cos, sin)

    rotated.replaces = rotation  # type: ignore[attr-defined]
    return rotated


def _alike(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    return cos.shape == sin.shape and all(cos.shape == (each.shape[0], *each.shape[2:]) for each in (q, k))


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return rotary(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return rotary(grad, cos, sin, ctx.dtype), None, None


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: torch.dtype | None = None) -> torch.Tensor:
    """Computes `reference_rotary` in float32 by the kernel, or with `back` the gradient of its x, which has this dtype.

    [B, H, T, D], [B, T, D], [B, T, D] -> [B, H, T, D], which lies in memory as [B, T, H, D]."""
    x, cos, sin = x.transpose(1, 2).contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x, dtype=back or torch.float32)
    is_narrow = torch.bfloat16 in (x.dtype, back)
    _kernel("whet_rotary")(is_narrow, back is not None, *_at(x, cos, sin, out), *cos.shape[:2], *x.shape[2:])
    return out.transpose(1, 2)


def _has_kernel(source: Path, *tensors: torch.Tensor) -> bool:
    """Tells whether the C++ kernels of a file can run: on plain CPU tensors, and not under torch.compile."""
    for each in tensors:
        if each.dtype not in KERNEL_DTYPES or not each.is_cpu or type(each) not in PLAIN:
            return False
    return not torch.compiler.is_compiling() and library(source) is not None


_RMS_NORM, _SILU_GATE, _ROTARY = (
    Path(__file__).with_name(f"{name}.cpp") for name in ("rms_norm", "silu_gate", "rotary")
)
_FLAG, _POINTER, _SIZE = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "whet_rms_norm": (_RMS_NORM, [*[_FLAG] * 3, *[_POINTER] * 4, *[_SIZE] * 2, ctypes.c_float]),
    "whet_rms_norm_backward": (_RMS_NORM, [*[_FLAG] * 3, *[_POINTER] * 6, *[_SIZE] * 2]),
    "whet_rotary": (_ROTARY, [*[_FLAG] * 2, *[_POINTER] * 4, *[_SIZE] * 4]),
    "whet_silu_gate": (_SILU_GATE, [_FLAG, *[_POINTER] * 3, _SIZE]),
    "whet_silu_gate_backward": (_SILU_GATE, [_FLAG, *[_POINTER] * 5, _SIZE]),
}


@cache
def _kernel(name: str) -> ctypes._NamedFuncPointer:  # type: ignore[name-defined]
    source, arguments = _ARGUMENTS[name]
    compiled = library(source)
    assert compiled is not None
    function = compiled[name]
    function.restype, function.argtypes = None, arguments  # type: ignore[assignment]
    return function


def _narrow(*tensors: torch.Tensor) -> list[int]:
    return [each.dtype is torch.bfloat16 for each in tensors]


def _at(*tensors: torch.Tensor) -> list[int]:
    return [each.data_ptr() for each in tensors]


def _sizes(x: torch.Tensor) -> tuple[int, int]:
    """Returns the number of rows and their width."""
    return x.numel() // max(1, x.shape[-1]), x.shape[-1]


def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
