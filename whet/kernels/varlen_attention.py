# SPDX-License-Identifier: Apache-2.0
"""Attention over packed rows in one call a layer, by FlashAttention on an accelerator. Only this file handles its API.

Queries are the tokens of all rows, one row after another. The keys of a row are the keys of its shared prompt and its
own keys, gathered by index. Grouped heads are passed without copies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from whet.kernels.tiles import power_of_two, tiles_of

# Counts of tokens and rows are padded to multiples, so that few different shapes occur.
TOKENS_STEP, STRETCHES_STEP = 64, 64
_operators = torch.library.Library("whet_varlen", "DEF")
_LAYOUT = (
    "Tensor queries, Tensor keys, Tensor? source, SymInt longest_query, SymInt longest_key, float scale, SymInt window"
)
_operators.define(f"forward(Tensor query, Tensor key, Tensor value, {_LAYOUT}) -> (Tensor, Tensor)")
_operators.define(
    "backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor log_sums, "
    f"{_LAYOUT}, Tensor? own, Tensor? shared, Tensor? users) -> (Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True)
class Stretches:
    """The layout of T tokens for one call of attention: S rows in sequence, with K keys. The last row is padding."""

    queries: torch.Tensor  # [S + 1] int32: the index at which each row's own tokens begin, and T
    keys: torch.Tensor  # [S + 1] int32: the index at which each row's keys begin, and K
    longest_query: int  # an upper bound of the rows' numbers of queries
    longest_key: int  # an upper bound of the rows' numbers of keys
    size: int  # T, padding included
    source: torch.Tensor | None = None  # [K] the token of each key; None: the keys are the T tokens
    own: torch.Tensor | None = None  # [T] index of each token's key in its own row
    shared: torch.Tensor | None = None  # [U] tokens of prompts that several rows share
    users: torch.Tensor | None = None  # [U, n] indices of their keys in the other rows, filled up with K
    tiles: torch.Tensor | None = None  # [n, 4] from `tiles_of`; `rows` are first keys. None: the kernel chooses tiles

    @classmethod
    def of(
        cls, own_lengths: torch.Tensor, prefix_lengths: torch.Tensor, in_order: torch.Tensor, tile: int = 0
    ) -> Stretches:
        """Builds the layout. own_lengths, prefix_lengths [rows]: number of each row's own tokens, and of its shared
        prompt's. in_order [rows, L]: their indices, prompt first, then -1. tile: its tokens; 0: the kernel chooses."""
        total, device = int(own_lengths.sum()), in_order.device
        size = rounded(total, TOKENS_STEP)
        lengths = torch.cat([own_lengths, own_lengths.new_tensor([size - total])])
        depths = lengths + F.pad(prefix_lengths, (0, 1))
        empty = -len(lengths) % STRETCHES_STEP
        found: dict[str, Any] = {
            "queries": F.pad(lengths, (1, empty)).cumsum(0).int(),
            "keys": F.pad(depths, (1, empty)).cumsum(0).int(),
            "longest_query": power_of_two(int(lengths.max())),
            "longest_key": power_of_two(int(depths.max())),
            "size": size,
            "tiles": tiles_of(lengths, depths.cumsum(0) - depths, depths - lengths, tile) if tile else None,
        }
        if not bool(prefix_lengths.any()):
            return cls(**found)
        is_key = in_order >= 0
        is_own = is_key & (torch.arange(in_order.shape[1], device=device) >= prefix_lengths[:, None])
        source = torch.cat([in_order[is_key], torch.arange(total, size, device=device)])
        number = torch.full(in_order.shape, -1, device=device)
        number[is_key] = torch.arange(len(source) - size + total, device=device)
        own = torch.cat([number[is_own], torch.arange(len(source) - size + total, len(source), device=device)])
        tokens, order = in_order[is_key & ~is_own].sort(stable=True)
        shared, counts = torch.unique_consecutive(tokens, return_counts=True)
        users = torch.full((len(shared), int(counts.max())), len(source), device=device)
        rank = torch.arange(len(order), device=device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        row = torch.arange(len(shared), device=device).repeat_interleave(counts)
        users[row, rank] = number[is_key & ~is_own][order]
        return cls(**found, source=source, own=own, shared=shared, users=users)


def varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, where: Stretches, scale: float, window: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Computes softmax(scale query key^T) value over each row's keys up to the token itself, or its `window` newest
    keys. `sinks` [H] are as in `Scores`.

    [T, H, D], [T, KV, D], [T, KV, D] -> [T, H, D]; differentiable."""
    out: torch.Tensor = _Varlen.apply(query, key, value, sinks, where, scale, window)
    return out


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, where, scale, window):  # type: ignore[no-untyped-def]
        layout = where.queries, where.keys, where.source, where.longest_query, where.longest_key, scale, window
        if where.tiles is None:
            out, log_sums = torch.ops.whet_varlen.forward(query, key, value, *layout)
        else:
            from whet.kernels import batch_invariant_triton

            source = torch.arange(where.size, device=query.device) if where.source is None else where.source
            given = query, key, value, source, where.tiles, (scale, window, 0.0)
            out, log_sums = batch_invariant_triton.attention(*given, 1, where.longest_key)
        if sinks is not None:  # added to each softmax sum, which the kernel's backward pass reads too
            without, log_sums = log_sums, torch.logaddexp(log_sums, sinks.float()[:, None])
            out = (out * (without - log_sums).exp().T[..., None]).to(out.dtype)
        kept = query, key, value, out, log_sums, *layout[:3], where.own, where.shared, where.users
        ctx.save_for_backward(sinks, *kept)
        ctx.rest = layout[3:]
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        sinks, *saved, own, shared, users = ctx.saved_tensors
        grads = torch.ops.whet_varlen.backward(grad, *saved, *ctx.rest, own, shared, users)
        grad_sinks = None
        if sinks is not None:
            out, log_sums = saved[3:5]
            share = (sinks.float()[:, None] - log_sums).exp()
            grad_sinks = -(share * (grad.float() * out.float()).sum(-1).T).sum(1).to(sinks.dtype)
        return *grads, grad_sinks, None, None, None


def _forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *layout: Any) -> Any:
    queries, keys, source, longest_query, longest_key, scale, window = layout
    if source is not None:
        key, value = key.index_select(0, source), value.index_select(0, source)
    left, right = (window - 1, 0) if window else (-1, 0)
    out, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, queries, keys, longest_query, longest_key, 0.0, not window, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out, log_sums


def _backward(grad: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    (query, key, value, out, log_sums), layout, (own, shared, users) = given[:5], given[5:12], given[12:]
    queries, keys, source, longest_query, longest_key, scale, window = layout
    if source is not None:
        key, value = key.index_select(0, source), value.index_select(0, source)
    left, right = (window - 1, 0) if window else (-1, 0)
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of random numbers: there is no dropout
    grads = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), query, key, value, out, log_sums, queries, keys, longest_query, longest_key, 0.0, not window,
        state, torch.empty(0, device=query.device), scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return grads[0], *(_to_tokens(each, own, shared, users) for each in grads[1:])


def _to_tokens(
    grad: torch.Tensor, own: torch.Tensor | None, shared: torch.Tensor | None, users: torch.Tensor | None
) -> torch.Tensor:
    """Converts the gradient of K keys to the gradient of T tokens. A shared token's gradients are summed in float32,
    always in the same order."""
    if own is None or shared is None or users is None:
        return grad
    found = grad.index_select(0, own)
    with_zero = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])
    others = with_zero[users].sum(1, dtype=torch.float32)
    return found.index_copy_(0, shared, (found[shared].float() + others).to(found.dtype))


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *layout: Any) -> Any:
    """Computes the attention row by row in plain torch; differentiable."""
    queries, keys, source, _, _, scale, window = layout
    if source is not None:
        key, value = key.index_select(0, source), value.index_select(0, source)
    outs, sums = [], []
    for row in range(len(queries) - 1):
        q, k, v = query[queries[row] : queries[row + 1]], *(x[keys[row] : keys[row + 1]] for x in (key, value))
        group = q.shape[1] // k.shape[1]
        q, k, v = q.transpose(0, 1), *(x.transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        back = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])
        hidden = (back < 0) | (back >= window) if window else back < 0
        scores = (q @ k.mT * scale).masked_fill(hidden, float("-inf"))
        outs.append((scores.softmax(-1) @ v).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)


def _reference_backward(grad: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    (query, key, value, _, log_sums), layout = given[:5], given[5:12]
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        out, sums = reference(*leaves, *layout)
        # As in the kernel, `log_sums` are given: their difference from the sums over keys (the sinks) is constant.
        rest = (log_sums + torch.log(-torch.expm1((sums - log_sums).clamp(max=0)))).detach()
        out = out * (sums - torch.logaddexp(sums, rest)).exp().T[..., None].to(out.dtype)
        return torch.autograd.grad(out, leaves, grad)


def _shapes(query: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)


def _grad_shapes(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


for kind, functions in {"CUDA": (_forward, _backward), "CPU": (reference, _reference_backward)}.items():
    for name, function in zip(("forward", "backward"), functions, strict=True):
        _operators.impl(name, function, kind)
torch.library.register_fake("whet_varlen::forward", _shapes, lib=_operators)
torch.library.register_fake("whet_varlen::backward", _grad_shapes, lib=_operators)


@cache
def has_kernel(device: torch.device) -> bool:
    """Tells whether torch has FlashAttention for the device: NVIDIA accelerators from Ampere on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


def rounded(count: int, step: int) -> int:
    """Rounds `count` up to a multiple of `step` if `count` is at least 2 `step`; else returns it unchanged."""
    return count if count < 2 * step else -(-count // step) * step
