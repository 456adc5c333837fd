# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of paged attention on an accelerator, for one token a row and for tiles of tokens. The reference in
torch is `paged_attention.reference`.

Triton's interpreter also runs them on a CPU (TRITON_INTERPRET=1). It supports no loop whose bound is a tensor, so there
the host passes the bound."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from whet.kernels import batch_invariant_triton
from whet.kernels.paged_attention import BLOCK_SIZE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KEYS = 64  # read at once by one program
PROGRAMS = 1024  # that fill a card: with fewer rows, the keys of a row are split over several programs
MOST_SPLITS = 32
WARPS, STAGES = 4, 3


@triton.jit
def _attend(
    query, key, value, keys, values, tables, slots, positions, sinks, out, sums,
    scale, window, cap, bound, query_row, query_head, key_row, key_head, value_row, value_head, table_row, cache_head,
    KV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Computes attention of one row, for one key head, over a part of its context: softmax(query keys^T) values."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, at = tl.load(slots + row).to(tl.int64), tl.load(positions + row).to(tl.int32)
    g, d, j = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, N)
    asks, has = (g < G)[:, None] & (d < D)[None, :], d < D
    table = tables + slot * table_row
    q = tl.load(query + row * query_row + (head * G + g)[:, None] * query_head + d[None, :], mask=asks, other=0.0)
    new_key = tl.load(key + row * key_row + head * key_head + d, mask=has, other=0.0).to(keys.dtype.element_ty)
    new_value = tl.load(value + row * value_row + head * value_head + d, mask=has, other=0.0).to(
        values.dtype.element_ty
    )
    if split == 0:
        block = tl.load(table + at // BLOCK).to(tl.int64)
        where = head * cache_head + (block * BLOCK + at % BLOCK) * D + d
        tl.store(keys + where, new_key, mask=has)
        tl.store(values + where, new_value, mask=has)
    own = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
    if CAPPED:
        own = cap * (2 / (1 + tl.exp(-2 * own / cap)) - 1)
    most, total, share = _begin(own, sinks, head * G + g, g < G, split)
    seen = share[:, None] * new_value.to(tl.float32)[None, :]
    begin = 0
    if WINDOWED:
        begin = tl.maximum(at - window + 1, 0)
    width = tl.cdiv(tl.cdiv(at - begin, N), SPLITS) * N
    first = begin + split * width
    last = tl.minimum(first + width, at)
    for start in range(0, bound if INTERPRETED else last - first, N):
        place = first + start + j
        inside = place < last
        block = tl.load(table + place // BLOCK, mask=inside, other=0).to(tl.int64)
        base = head * cache_head + (block * BLOCK + place % BLOCK) * D
        there = inside[:, None] & has[None, :]
        k = tl.load(keys + base[:, None] + d[None, :], mask=there, other=0.0)
        scores = tl.dot(q.to(k.dtype), tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = cap * (2 / (1 + tl.exp(-2 * scores / cap)) - 1)
        scores = tl.where(inside[None, :], scores, -1e30)
        larger = tl.maximum(most, tl.max(scores, 1))
        shrink, p = tl.exp(most - larger), tl.where(inside[None, :], tl.exp(scores - larger[:, None]), 0.0)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(values + base[:, None] + d[None, :], mask=there, other=0.0)
        seen = seen * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        most = larger
    heads = (row * KV + head) * G + g
    if SPLITS == 1:
        result = (seen / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + heads[:, None] * D + d[None, :], result, mask=asks)
    else:
        part = heads * SPLITS + split
        tl.store(out + part[:, None] * D + d[None, :], seen, mask=asks)
        tl.store(sums + part * 2, most, mask=g < G)
        tl.store(sums + part * 2 + 1, total, mask=g < G)


@triton.jit
def _begin(own, sinks, heads, inside, split):
    """Begins the softmax of a row with its own key and the sink, which belong to the first part of its context. Returns
    their largest score, the sum of exp(score - largest), and the own key's term of this sum."""
    most = tl.where(split == 0, own, -1e30)
    share = tl.where(split == 0, 1.0, 0.0) + tl.zeros_like(own)
    total = share
    if sinks is not None:
        sink = tl.where(split == 0, tl.load(sinks + heads, mask=inside, other=-2e30).to(tl.float32), -2e30)
        larger = tl.maximum(most, sink)
        share = share * tl.exp(most - larger)
        total = share + tl.exp(sink - larger)
        most = larger
    return most, total, share


@triton.jit
def _join(parts, sums, out, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr):
    """Combines the results of all parts of the context, for one head of one row."""
    head, s, d = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, DP)
    most, total = tl.load(sums + (head * SPLITS + s) * 2), tl.load(sums + (head * SPLITS + s) * 2 + 1)
    share = tl.exp(most - tl.max(most, 0))
    at = (head * SPLITS + s)[:, None] * D + d[None, :]
    seen = tl.sum(tl.load(parts + at, mask=(d < D)[None, :], other=0.0) * share[:, None], 0)
    tl.store(out + head * D + d, (seen / tl.sum(total * share, 0)).to(out.dtype.element_ty), mask=d < D)


@torch.library.custom_op("whet::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    tables: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, scale: float, window: int, cap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Writes the key and value of one token a row into its block, and computes its attention to positions 0..its own.

    query [B, H, D], key and value [B, KV, D]. keys and values [KV, blocks, 16, D] of a layer, written in place. tables
    [S, W] int32. slots [B]: each token's row of the table. positions [B]. scale, window, cap and sinks as in `Scores`.
    Returns [B, H, D]."""
    (rows, heads, dim), kv_heads = query.shape, key.shape[1]
    group, splits = heads // kv_heads, 1
    while splits < MOST_SPLITS and rows * kv_heads * splits < PROGRAMS:
        splits *= 2
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    out = torch.empty(rows, heads, dim, dtype=query.dtype, device=query.device)
    found, sums = out, out
    if splits > 1:
        found = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=query.device)
        sums = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=query.device)
    sizes = {"D": dim, "DP": triton.next_power_of_2(dim), "SPLITS": splits}
    _attend[(rows, kv_heads, splits)](
        query, key, value, keys, values, tables, slots, positions, sinks, found, sums,
        scale, window, cap, tables.shape[1] * BLOCK_SIZE,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], tables.stride(0), keys.stride(0),
        KV=kv_heads, G=group, GP=max(16, triton.next_power_of_2(group)), BLOCK=BLOCK_SIZE, N=KEYS,
        WINDOWED=window > 0, CAPPED=cap > 0, INTERPRETED=INTERPRETED, num_warps=WARPS, num_stages=STAGES, **sizes,
    )  # fmt: skip
    if splits > 1:
        _join[(rows * heads,)](found, sums, out, **sizes)
    return out


@decode_attention.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


@torch.library.custom_op("whet::tile_attention", mutates_args=("keys", "values"))
def tile_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    tables: torch.Tensor, slots: torch.Tensor, tiles: torch.Tensor, scale: float, window: int, cap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Computes `decode_attention` for several consecutive tokens of each sequence. slots [T] has the place of each key
    in the cache. tiles [n, 4] come from `tiles.tiles_of`, called with rows of `tables` [S, W]."""
    kept = [each.flatten(1, 2) for each in (keys, values)]
    for there, new in zip(kept, (key, value), strict=True):
        there.index_copy_(1, slots, new.transpose(0, 1).to(there.dtype))
    (k, v), bound = (each.transpose(0, 1) for each in kept), tables.shape[1] * BLOCK_SIZE
    out, sums = batch_invariant_triton.attention(query, k, v, tables, tiles, (scale, window, cap), BLOCK_SIZE, bound)
    if sinks is None:
        return out
    return (out * (sums - sinks.float()[:, None]).sigmoid().T[..., None]).to(out.dtype)


@tile_attention.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)
