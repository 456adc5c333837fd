# SPDX-License-Identifier: Apache-2.0
"""Paged attention. On a CPU the operator `whet::paged_attention` uses a C++ kernel, or plain torch without a compiler.
On an accelerator torch's scaled_dot_product_attention runs over the blocks of the table.

The blocks, slots and keys of a batch are computed once for all layers. The host waits for no result."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from whet.compiled import library
from whet.kernels.attention import Scores, softmax

BLOCK_SIZE = 16  # tokens in a block of the cache; the kernel counts on it
GATHERED = 2**27  # numbers of keys that are read out of the cache at once
WIDTH_STEP = 8  # blocks: contexts are padded to a multiple of it, so that sizes come again

_operators = torch.library.Library("whet", "DEF")
_operators.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor tables, "
    "Tensor rows, Tensor positions, float scale, int window, float cap, Tensor? sinks) -> Tensor"
)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes each token's key and value into its block, then computes its attention to positions 0..its own of its
    sequence.

    query [T, H, D], key [T, KV, D], value [T, KV, V]: a flat batch of tokens of any sequences.
    keys [blocks, KV, D, 16], values [blocks, KV, 16, V]: one layer of the cache, blocks of 16 tokens, written in place.
    If values is [..., 0], there is no cache of values: a token's value is the first V numbers of its key.
    tables [S, W] int32: the blocks of each sequence, in order.   rows [T] int32: each token's sequence, -1 on padding.
    positions [T] int64.   window: attend only to so many last positions; 0 means all.
    cap: scores s become cap tanh(s / cap); 0 leaves them.   sinks [H]: one more score of each query, without a value.
    Returns [T, H, V], zero on padding."""
    out: torch.Tensor = torch.ops.whet.paged_attention(
        query, key, value, keys, values, tables, rows, positions, scale, window, cap, sinks
    )
    return out


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `paged_attention` in torch: gathers every token's keys, and masks keys that the token does not see."""
    (tokens, heads, dim), kv_heads = query.shape, key.shape[1]
    real = rows >= 0
    table = tables[rows.clamp(min=0).long()].long()
    block = table.gather(1, (positions // BLOCK_SIZE)[:, None]).squeeze(1)[real]
    slot = (positions % BLOCK_SIZE)[real]
    keys[block, :, :, slot] = key[real]
    if is_apart := bool(values.shape[-1]):
        values[block, :, slot] = value[real]

    width = int(positions.max()) // BLOCK_SIZE + 1 if tokens else 0
    seen = torch.arange(width * BLOCK_SIZE, device=query.device)
    visible = seen[None, :] <= positions[:, None]
    if window > 0:
        visible &= seen[None, :] > positions[:, None] - window
    gathered_keys = keys[table[:, :width]].permute(0, 2, 1, 4, 3).reshape(tokens, kv_heads, -1, dim)
    gathered_values = gathered_keys[..., : value.shape[2]]
    if is_apart:
        gathered_values = values[table[:, :width]].transpose(1, 2).reshape(tokens, kv_heads, -1, value.shape[2])
    hidden = ~visible[:, None, None, :]
    # Memory that was never written may hold NaN: keep it out of the products too.
    gathered_keys = gathered_keys.masked_fill(hidden.mT.squeeze(1)[:, None], 0)
    gathered_values = gathered_values.masked_fill(hidden.mT.squeeze(1)[:, None], 0)
    grouped = query.view(tokens, kv_heads, heads // kv_heads, dim).float()
    scores = grouped @ gathered_keys.float().mT * scale
    scores = (cap * (scores / cap).tanh() if cap else scores).masked_fill(hidden, float("-inf"))
    weights = softmax(scores, None if sinks is None else sinks.view(kv_heads, -1, 1))
    out = (weights @ gathered_values.float()).to(query.dtype).view(tokens, heads, -1)
    return out.masked_fill(~real[:, None, None], 0)


def _cpu(*given: Any) -> torch.Tensor:
    """Implements the operator on a CPU, with the operator's arguments."""
    query, key, value, keys, values, tables, rows, positions, scale, window, cap, sinks = given
    kernel = load_kernel()
    (tokens, heads, dim), value_dim = query.shape, value.shape[2]
    is_odd = dim % BLOCK_SIZE or value_dim % BLOCK_SIZE
    if kernel is None or query.dtype not in (torch.float32, torch.bfloat16) or is_odd:
        return reference(*given)
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    out = query.new_empty(tokens, heads, value_dim)
    sinks = None if sinks is None else sinks.float().contiguous()
    sizes = (ctypes.c_int64 * 13)(
        *(tokens, heads, key.shape[1], dim, value_dim, tables.shape[1], window),
        *(query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
    )
    kernel(
        int(query.dtype == torch.bfloat16),
        *(x.data_ptr() if x.numel() else None for x in (query, key, value, keys, values, tables, rows, positions, out)),
        sizes,
        scale,
        cap,
        None if sinks is None else sinks.data_ptr(),
    )
    return out


def _shape_only(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(*query.shape[:2], value.shape[2])


_operators.impl("paged_attention", _cpu, "CPU")
torch.library.register_fake("whet::paged_attention", _shape_only, lib=_operators)


@cache
def load_kernel() -> ctypes._NamedFuncPointer | None:  # type: ignore[name-defined]
    """Loads the compiled kernel; None without a working C++ compiler."""
    compiled = library(Path(__file__).with_suffix(".cpp"))
    if compiled is None:
        return None
    function = compiled.whet_paged_attention
    function.restype = None
    pointers, numbers = [ctypes.c_void_p] * 9, [ctypes.c_float] * 2
    function.argtypes = [ctypes.c_int, *pointers, ctypes.POINTER(ctypes.c_int64), *numbers, ctypes.c_void_p]
    return function


@dataclass(frozen=True)
class BlockIndex:
    """The places of T tokens and of their keys in the cache, for S sequences with at most Q tokens and K keys each."""

    slots: torch.Tensor  # [T] the index in the cache of each token's key; padding writes into the spare block
    keys: torch.Tensor  # [S, K] the indices in the cache of each sequence's keys
    grid: torch.Tensor  # [T] each token's index in [S, Q], flattened; S Q for padding
    positions: torch.Tensor  # [S, Q]
    masks: dict[int, torch.Tensor] = field(default_factory=dict)  # [S, 1, Q, K] by window

    @classmethod
    def of(
        cls, tables: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, spare: int, longest: int, context: int
    ) -> BlockIndex:
        """Builds an index from `paged_attention`'s arguments. `longest` is Q, the largest number of these tokens in a
        sequence, `context` the largest position + 1, `spare` an unused block."""
        width = min(tables.shape[1], -(-context // (BLOCK_SIZE * WIDTH_STEP)) * WIDTH_STEP)
        real, row, tables = rows >= 0, rows.clamp(min=0).long(), tables.long()
        block = tables[row].gather(1, (positions // BLOCK_SIZE)[:, None]).squeeze(1)
        slots = (block * BLOCK_SIZE + positions % BLOCK_SIZE).where(real, spare * BLOCK_SIZE)
        if longest == 1:  # decoding: each token is a sequence
            tables, grid = tables[row], torch.arange(len(row), device=row.device)
        else:
            start = torch.full_like(tables[:, 0], context).scatter_reduce(
                0, row, positions.where(real, context), "amin"
            )
            grid = (row * longest + positions - start[row]).where(real, len(tables) * longest)
        at = torch.arange(BLOCK_SIZE, device=row.device)
        keys = (tables[:, :width, None] * BLOCK_SIZE + at).flatten(1)
        places = positions.new_zeros(len(tables) * longest + 1).index_copy(0, grid, positions)
        return cls(slots, keys, grid, places[:-1].view(-1, longest))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        """Stores key and value in one layer of the cache, both [KV, blocks, 16, .], and attends: [T, H, D], [T, KV, D],
        [T, KV, V] -> [T, H, V]. Arguments are as in `paged_attention`. Results on padding are meaningless."""
        kept = keys.flatten(1, 2), values.flatten(1, 2)
        for held, new in zip(kept, (key, value), strict=True):
            held.index_copy_(1, self.slots, new.transpose(0, 1).to(held.dtype))
        (sequences, longest), (_, heads, dim), kv_heads = self.positions.shape, query.shape, key.shape[1]
        asked = query.new_zeros(sequences * longest + 1, heads, dim).index_copy(0, self.grid, query)
        asked = asked[:-1].view(sequences, longest, heads, dim).transpose(1, 2)  # [S, H, Q, D]
        mask, size = self._mask(scores.window), max(1, GATHERED // (self.keys.shape[1] * kv_heads * dim))
        outs = []
        for q, seen, at in zip(asked.split(size), mask.split(size), self.keys.split(size), strict=True):
            k, v = (c.index_select(1, at.flatten()).unflatten(1, at.shape).transpose(0, 1) for c in kept)
            outs.append(_attend(q, k, v, seen, scores))  # k, v [s, KV, K, D]
        out = torch.cat(outs).transpose(1, 2).flatten(0, 1)
        return F.pad(out, (0, 0, 0, 0, 0, 1)).index_select(0, self.grid)

    def _mask(self, window: int) -> torch.Tensor:
        """Returns a mask [S, 1, Q, K], True if a token may attend to a key."""
        if window not in self.masks:
            at, positions = torch.arange(self.keys.shape[1], device=self.keys.device), self.positions[:, None, :, None]
            seen = at <= positions
            self.masks[window] = seen & (at > positions - window) if window else seen
        return self.masks[window]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, form: Scores) -> torch.Tensor:
    """Attends: [s, H, Q, D], [s, KV, K, D], [s, KV, K, V], [s, 1, Q, K] -> [s, H, Q, V]. Kernels with a mask do not
    support grouped heads. So the heads of a key head become queries, or with several queries the keys are repeated."""
    sequences, heads, longest, dim = q.shape
    group = heads // k.shape[1]
    if longest == 1:
        q = q.reshape(sequences, -1, group, dim)
        seen = seen.expand(-1, -1, group, -1)
    elif group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    if form.cap or form.sinks is not None:  # the fused kernel supports neither
        scores = (q @ k.mT).float() * form.scale
        scores = (form.cap * (scores / form.cap).tanh() if form.cap else scores).masked_fill(~seen, float("-inf"))
        sinks = None if form.sinks is None else form.sinks.view(-1, group if longest == 1 else 1, 1)
        out = softmax(scores, sinks).to(v.dtype) @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=form.scale)
    return out.reshape(sequences, heads, longest, -1)
