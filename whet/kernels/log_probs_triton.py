# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the output layer on an accelerator: one computes token statistics in one pass over the logits, the
other overwrites logits with their gradient. The reference in torch is `log_probs`."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU: loops take their bound from the host
TILE = 4096  # tokens of the vocabulary read at once


@triton.jit
def _formed(z, scale, cap, heat, CAPPED: tl.constexpr):
    """Returns logit / temperature, computed from the unscaled logit z."""
    z = z.to(tl.float32) * scale
    if CAPPED:
        z = cap * (2 / (1 + tl.exp(-2 * z / cap)) - 1)
    return z / heat


@triton.jit
def _statistics(
    products, targets, found, heats, V, row_stride, count, heat_stride, scale, cap,
    TILE: tl.constexpr, CAPPED: tl.constexpr, BOUND: tl.constexpr,
):  # fmt: skip
    """Reduces a token's logits l to sums of exp(l - m), l exp(l - m) and exp(l - m)^2, with m their maximum."""
    row, i = tl.program_id(0), tl.arange(0, TILE)
    heat = tl.load(heats + row * heat_stride)
    base = products + row.to(tl.int64) * row_stride
    most = tl.full([TILE], float("-inf"), tl.float32)
    total, mean, squares = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(0, BOUND if BOUND > 0 else V, TILE):  # each lane keeps its own sums
        at = start + i
        z = _formed(tl.load(base + at, mask=at < V, other=float("-inf")), scale, cap, heat, CAPPED)
        z = tl.where(at < V, z, float("-inf"))
        larger = tl.maximum(most, z)
        shrink, p = tl.where(most == larger, 1.0, tl.exp(most - larger)), tl.where(at < V, tl.exp(z - larger), 0.0)
        total, squares = total * shrink + p, squares * shrink * shrink + p * p
        mean = mean * shrink + tl.where(p > 0, p * z, 0.0)
        most = larger
    top = tl.max(most, 0)
    shrink = tl.exp(most - top)
    total, squares = tl.sum(total * shrink, 0), tl.sum(squares * shrink * shrink, 0)
    mean = tl.sum(mean * shrink, 0) / total
    log_sum = top + tl.log(total)
    own = _formed(tl.load(base + tl.load(targets + row)), scale, cap, heat, CAPPED)
    tl.store(found + row, own - log_sum)
    tl.store(found + count + row, log_sum - mean)
    tl.store(found + 2 * count + row, squares / (total * total))
    tl.store(found + 3 * count + row, log_sum)


@triton.jit
def _gradient(
    products, targets, log_sums, entropies, grad_log_probs, grad_entropies, V, row_stride, scale, cap, heat,
    TILE: tl.constexpr, CAPPED: tl.constexpr, HAS_ENTROPY: tl.constexpr,
):  # fmt: skip
    """Writes (g (onehot - pi) - h pi (log pi + H)) slope for a tile of logits; g, h: gradients of log-prob and H."""
    row, at = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    where = products + row.to(tl.int64) * row_stride + at
    z = _formed(tl.load(where, mask=at < V, other=0.0), scale, cap, heat, CAPPED)
    log_pi = z - tl.load(log_sums + row)
    pi, g = tl.exp(log_pi), tl.load(grad_log_probs + row)
    grad = tl.where(at == tl.load(targets + row), g, 0.0) - g * pi
    if HAS_ENTROPY:
        grad -= tl.load(grad_entropies + row) * pi * (log_pi + tl.load(entropies + row))
    slope = scale / heat
    if CAPPED:
        part = z * heat / cap
        grad = grad * (1 - part * part)
    tl.store(where, (grad * slope).to(products.dtype.element_ty), mask=at < V)


def statistics(
    products: torch.Tensor, targets: torch.Tensor, scale: float, cap: float, temperature: float | torch.Tensor
) -> torch.Tensor:
    """Computes statistics [4, N] float32 of softmax(form(products) / temperature): log-prob of the target, entropy, sum
    of pi^2, log-sum-exp. `products` [N, V] are unscaled logits; `temperature` is a number or [N]."""
    if not isinstance(temperature, torch.Tensor):
        temperature = torch.full((1,), temperature, dtype=torch.float32, device=products.device)
    found = torch.empty(4, len(products), dtype=torch.float32, device=products.device)
    size = products.shape[1]
    _statistics[(len(products),)](
        products, targets, found, temperature, size, products.stride(0), len(products),
        0 if temperature.numel() == 1 else temperature.stride(0), scale, cap,
        TILE=TILE, CAPPED=cap > 0, BOUND=size if INTERPRETED else 0, num_warps=8,
    )  # fmt: skip
    return found


def gradient_(
    products: torch.Tensor, targets: torch.Tensor, log_sums: torch.Tensor, entropies: torch.Tensor,
    grad_log_probs: torch.Tensor, grad_entropies: torch.Tensor | None, scale: float, cap: float, temperature: float,
) -> torch.Tensor:  # fmt: skip
    """Overwrites unscaled logits [N, V] by their gradient. Gradients of log-probs and entropies are [N] float32."""
    rows, size = products.shape
    has_entropy = grad_entropies is not None
    _gradient[(rows, triton.cdiv(size, TILE))](
        products, targets, log_sums, entropies, grad_log_probs, grad_entropies if has_entropy else grad_log_probs,
        size, products.stride(0), scale, cap, temperature,
        TILE=TILE, CAPPED=cap > 0, HAS_ENTROPY=has_entropy, num_warps=8,
    )  # fmt: skip
    return products
