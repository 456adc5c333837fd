# SPDX-License-Identifier: Apache-2.0
"""Causal attention over packed rows: over padded rows by matrix products, or on a CPU, for rows of few tokens, by a C++
kernel without padding."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from whet.compiled import library
from whet.kernels.attention import Mask, Scores, causal
from whet.kernels.linear import PLAIN

# Most keys of a row, its shared prompt included. Longer rows are left to matrix products, which compute them faster on
# processors with AVX-512 and AMX (`python -m benchmarks.short_rows`). The kernel takes 128.
MOST_KEYS = {torch.float32: 64, torch.bfloat16: 32}


class BunchOfRows(Mask, Protocol):
    """Some rows of a packed batch, and their places in a padded one (`whet.models.packing.Bunch`)."""

    @property
    def tokens(self) -> slice: ...
    @property
    def slots(self) -> torch.Tensor: ...
    @property
    def width(self) -> int: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def prefix_tokens(self) -> torch.Tensor: ...
    @property
    def prefix_slots(self) -> torch.Tensor: ...
    @property
    def prefix_lengths(self) -> torch.Tensor: ...
    @property
    def prefix_width(self) -> int: ...
    def places(self, with_prompts: bool) -> tuple[torch.Tensor, int]: ...
    def unpad(self, grid: torch.Tensor) -> torch.Tensor: ...


class PackedTokens(Protocol):
    """A packed batch (`whet.models.packing.Layout`)."""

    @property
    def bunches(self) -> tuple[BunchOfRows, ...]: ...
    @property
    def short_rows(self) -> ShortRows: ...


@torch.compiler.disable  # shapes differ in every batch; without this the code around it would be compiled again
def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, packed: PackedTokens
) -> torch.Tensor:
    """Computes attention of a packed batch with n tokens: [n, H, D], [K, KV, D], [K, KV, V] -> [n, H, V]."""
    if suits(query, key, value, scores, packed.bunches):
        out: torch.Tensor = _ShortAttention.apply(query, key, value, packed.short_rows, scores)
        return out
    return padded_attention(query, key, value, scores, packed.bunches)


def padded_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, bunches: Sequence[BunchOfRows]
) -> torch.Tensor:
    """Computes `packed_attention` over padded rows, bunch by bunch."""
    parts = ((query, False), (key, True), (value, True))
    spread = [SpreadTokens.apply(flat, bunches, with_prompts) for flat, with_prompts in parts]
    outs = []
    for bunch, *heads in zip(bunches, *spread, strict=True):
        q, k, v = (x.transpose(1, 2) for x in heads)
        outs.append(bunch.unpad(causal(q, k, v, scores, bunch).transpose(1, 2)))
    return torch.cat(outs) if outs else value.new_zeros(0, query.shape[1], value.shape[2]) + query.sum() * 0.0


class ShortRows(NamedTuple):
    """The places of the tokens of R rows. The own tokens of a row are next to each other, one row after another."""

    own: torch.Tensor  # [R + 1] int64, the first own token of each row, and the number of all own tokens
    shared: torch.Tensor  # [R + 1] int64, the first entry of each row in `prompts`
    prompts: torch.Tensor  # [P] int64, the tokens of the shared prompt of each row

    @classmethod
    def of(cls, parts: Sequence[BunchOfRows]) -> ShortRows:
        """Returns the rows of all parts, in order."""
        lengths = torch.cat([torch.bincount(each.slots // each.width, minlength=each.num_rows) for each in parts])
        shared = torch.cat([each.prefix_lengths for each in parts])
        own, begins = (torch.nn.functional.pad(each.cumsum(0), (1, 0)) for each in (lengths, shared))
        return cls(own, begins, torch.cat([each.prefix_tokens for each in parts]))


def suits(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, parts: Sequence[BunchOfRows]
) -> bool:
    """Tells whether the kernel can compute attention of these rows. It computes plain causal attention, and does not
    run inside torch's dispatch modes, which would not see the call."""
    most = MOST_KEYS.get(query.dtype, 0)
    return (
        bool(parts)
        and all(each.width + each.prefix_width <= most and each.key_runs is None for each in parts)
        and not scores.cap
        and scores.sinks is None
        and all(each.is_cpu and type(each) in PLAIN for each in (query, key, value))
        and query.dtype == key.dtype == value.dtype
        and not torch._C._len_torch_dispatch_stack()
        and bool(_kernels())
    )


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, rows, scores):  # type: ignore[no-untyped-def]
        query, key, value = (each.contiguous() for each in (query, key, value))
        out = query.new_empty(*query.shape[:2], value.shape[2])
        log_sums = query.new_empty(query.shape[:2], dtype=torch.float32)
        ctx.rows, ctx.scores = rows, scores
        ctx.save_for_backward(query, key, value, log_sums)
        _kernels()[0](*_arguments([query, key, value, out, log_sums], query, key, value, rows, scores))
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        query, key, value, log_sums = ctx.saved_tensors
        rows: ShortRows = ctx.rows
        grad, of_query = grad.contiguous(), torch.empty_like(query)
        # A shared prompt gets gradients from all its rows: a long sum, in float32.
        sums = [torch.zeros_like(each, dtype=torch.float32) for each in (key, value)]
        parts = [each.new_empty(len(rows.prompts), *each.shape[1:]) for each in sums]
        tensors = [grad, query, key, value, log_sums, of_query, *sums, *parts]
        _kernels()[1](*_arguments(tensors, query, key, value, rows, ctx.scores))
        of_key, of_value = (
            total.index_add_(0, rows.prompts, part).to(key.dtype) for total, part in zip(sums, parts, strict=True)
        )
        return of_query, of_key, of_value, None, None


def _arguments(
    tensors: Sequence[torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: ShortRows,
    scores: Scores,
) -> list[Any]:
    """Returns the arguments of a kernel that gets `tensors`."""
    places = [each.data_ptr() for each in (*tensors, *rows)]
    sizes = [len(rows.own) - 1, query.shape[1], key.shape[1], query.shape[2], value.shape[2], scores.window]
    return [query.dtype is torch.bfloat16, *places, *sizes, scores.scale]


@cache
def _kernels() -> tuple[Any, ...]:
    """Returns the compiled kernels, forward and backward. Empty without a C++ compiler."""
    if (compiled := library(Path(__file__).with_suffix(".cpp"))) is None:
        return ()
    found = compiled.whet_packed_attention, compiled.whet_packed_attention_backward
    for function, tensors in zip(found, (8, 13), strict=True):
        function.restype = None
        function.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * tensors, *[ctypes.c_int64] * 6, ctypes.c_float]
    return found


class SpreadTokens(torch.autograd.Function):
    """Copies the tokens of each bunch into its padded tensor, with or without shared prompts: [T, ...] -> for each
    bunch [num_rows, (prefix_width +) width, ...]. One function copies for all bunches, so that the gradient is one
    tensor, not a sum."""

    @staticmethod
    def forward(ctx, flat: torch.Tensor, bunches: Sequence[BunchOfRows], with_prompts: bool):  # type: ignore[no-untyped-def]
        ctx.bunches, ctx.with_prompts, ctx.size = bunches, with_prompts, len(flat)
        grids = []
        for bunch in bunches:
            slots, width = bunch.places(with_prompts)
            grid = flat.new_zeros((bunch.num_rows * width, *flat.shape[1:])).index_copy_(0, slots, flat[bunch.tokens])
            if with_prompts:
                grid.index_copy_(0, bunch.prefix_slots, flat.index_select(0, bunch.prefix_tokens))
            grids.append(grid.unflatten(0, (bunch.num_rows, width)))
        return tuple(grids)

    @staticmethod
    def backward(ctx, *grads: torch.Tensor):  # type: ignore[no-untyped-def]
        pairs = list(zip(ctx.bunches, (grad.flatten(0, 1) for grad in grads), strict=True))
        flat = torch.cat([grad.index_select(0, bunch.places(ctx.with_prompts)[0]) for bunch, grad in pairs])
        if ctx.size > len(flat):  # tokens that are only keys, in no bunch
            flat = torch.cat([flat, flat.new_zeros(ctx.size - len(flat), *flat.shape[1:])])
        if ctx.with_prompts:
            tokens = torch.cat([bunch.prefix_tokens for bunch, _ in pairs])
            prefixes = torch.cat([grad.index_select(0, bunch.prefix_slots) for bunch, grad in pairs])
            wide = torch.promote_types(flat.dtype, torch.float32)  # many rows may share a prompt: a long sum
            flat = flat.to(wide).index_add_(0, tokens, prefixes.to(wide)).to(flat.dtype)
        return flat, None, None


def padded(flat: torch.Tensor, slots: torch.Tensor, size: int) -> torch.Tensor:
    """Copies rows of `flat` to the rows `slots` of a tensor with `size` rows, 0 elsewhere; differentiable."""
    return flat.new_zeros((size, *flat.shape[1:])).index_copy_(0, slots, flat)


class Unpad(torch.autograd.Function):
    """Inverts `padded`. Slots are distinct, so the gradient is a copy, while `index_select` would sum."""

    @staticmethod
    def forward(ctx, padded: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(slots)
        ctx.size = padded.shape[0]
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        (slots,) = ctx.saved_tensors
        return grad.new_zeros((ctx.size, *grad.shape[1:])).index_copy_(0, slots, grad), None
