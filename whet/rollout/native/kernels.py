# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the native engine on an accelerator: attention of one token a row over the block table, and
sampling in one pass over the logits. The references in torch are `paged_attention.reference` and `sampling.sample`.

Triton's interpreter runs them on a CPU too (TRITON_INTERPRET=1). It supports no loop with a tensor as bound: there
loops take their bound from the host."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from whet.models import fixed_kernels
from whet.rollout.native.paged_attention import BLOCK_SIZE
from whet.rollout.sampling import SamplingState

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KEYS = 64  # read at once by one program
PROGRAMS = 1024  # that fill a card: with fewer rows, the keys of a row are split over several programs
MOST_SPLITS = 32
WARPS, STAGES = 4, 3
TILE = 4096  # tokens of the vocabulary that one program reads


@triton.jit
def _attend(
    query, key, value, keys, values, tables, slots, positions, sinks, out, sums,
    scale, window, cap, bound, query_row, query_head, key_row, key_head, value_row, value_head, table_row, cache_head,
    KV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Computes the attention of one row, for one key head, over a part of its context: softmax(query keys^T) values."""
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
    """The largest score, the sum of exp(. - largest), and the own key's part of it, over this key and the sink, which
    belong to the first part of a context."""
    most = tl.where(split == 0, own, -1e30)
    share = tl.where(split == 0, 1.0, 0.0) + tl.zeros_like(own)
    total = share
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=inside & (split == 0), other=-2e30).to(tl.float32)
        larger = tl.maximum(most, sink)
        share = share * tl.exp(most - larger)
        total = share + tl.exp(sink - larger)
        most = larger
    return most, total, share


@triton.jit
def _join(parts, sums, out, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr):
    """Combines the results of one head of one row over the parts of its context."""
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

    query [B, H, D], key and value [B, KV, D]; keys and values [KV, blocks, 16, D] of a layer, written in place; tables
    [S, W] int32; slots [B] the row of the table; positions [B]; scale, window, cap and sinks as in `Scores`.
    Returns [B, H, D].
    """
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
    """`decode_attention` for several consecutive tokens of a sequence: slots [T] has the place of each key in the
    cache, tiles [n, 4] come from `packing.tiles_of`, and tables [S, W] has a row for each sequence."""
    kept = [each.flatten(1, 2) for each in (keys, values)]
    for there, new in zip(kept, (key, value), strict=True):
        there.index_copy_(1, slots, new.transpose(0, 1).to(there.dtype))
    (k, v), bound = (each.transpose(0, 1) for each in kept), tables.shape[1] * BLOCK_SIZE
    out, sums = fixed_kernels.attention(query, k, v, tables, tiles, (scale, window, cap), BLOCK_SIZE, bound)
    if sinks is None:
        return out
    return (out * (sums - sinks.float()[:, None]).sigmoid().T[..., None]).to(out.dtype)


@tile_attention.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


@triton.jit
def _tile(logits, slots, temperature, maxima, sums, likeliest, V, stride, tiles, TILE: tl.constexpr):
    """Reduces a tile of logits / temperature: the largest, its index, and the sum of exp(. - largest)."""
    row, tile = tl.program_id(0), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    heat = tl.load(temperature + tl.load(slots + row))
    z = tl.load(logits + row.to(tl.int64) * stride + at, mask=at < V, other=float("-inf")).to(tl.float32) / heat
    most = tl.max(z, 0)
    tl.store(maxima + row * tiles + tile, most)
    tl.store(sums + row * tiles + tile, tl.sum(tl.where(z > float("-inf"), tl.exp(z - most), 0.0), 0))
    tl.store(likeliest + row * tiles + tile, tile * TILE + tl.argmax(z, 0))


@triton.jit
def _uniform(key, count):
    """The random number of `sampling.uniforms`."""
    x = key.to(tl.uint64) + (count + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 40).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _pick(
    logits, slots, counts, keys, temperature, greedy, maxima, sums, likeliest, newest, tokens, log_probs,
    V, stride, tiles, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Chooses the token of one row: first the tile, then the token, at which the cumulated probability passes the
    uniform number."""
    row, t = tl.program_id(0), tl.arange(0, TILES)
    slot = tl.load(slots + row)
    heat = tl.load(temperature + slot)
    most = tl.load(maxima + row * tiles + t, mask=t < tiles, other=float("-inf"))
    top = tl.max(most, 0)
    share = tl.load(sums + row * tiles + t, mask=t < tiles, other=0.0) * tl.exp(most - top)  # of -inf alone: 0
    total, cumulated = tl.sum(share, 0), tl.cumsum(share, 0)
    point = _uniform(tl.load(keys + slot), tl.load(counts + row)) * total
    fullest = tl.max(tl.where(share > 0, t, 0), 0)
    tile = tl.minimum(tl.sum((cumulated <= point).to(tl.int32), 0), fullest)
    before = tl.sum(tl.where(t < tile, share, 0.0), 0)
    i = tl.arange(0, TILE)
    at = tile * TILE + i
    base = logits + row.to(tl.int64) * stride
    weight = tl.exp(tl.load(base + at, mask=at < V, other=float("-inf")).to(tl.float32) / heat - top)
    found = tl.sum((tl.cumsum(weight, 0) <= point - before).to(tl.int32), 0)
    token = tile * TILE + tl.minimum(found, tl.max(tl.where(weight > 0, i, 0), 0))
    best = tl.min(tl.where(most == top, t, TILES), 0)
    token = tl.where(tl.load(greedy + slot) != 0, tl.load(likeliest + row * tiles + best), token).to(tl.int32)
    chosen = tl.load(base + token).to(tl.float32) / heat - top
    tl.store(newest + slot, token.to(tl.int64))
    tl.store(tokens + row, token)
    tl.store(log_probs + row, chosen - tl.log(total))


def pick(
    logits: torch.Tensor, sampling: SamplingState, slots: torch.Tensor, counts: torch.Tensor, newest: torch.Tensor,
    results: torch.Tensor,
) -> None:  # fmt: skip
    """`sampling.sample` for rows without cuts and constraints; parameters and the `newest` token are at `slots` [B].

    logits [B, V]; counts [B] tokens sampled before; results [2, B] int32 gets the tokens, and the bits of their
    log-probs. Sums are of float32, by tiles: within 1e-5 of a boundary the token may be the next one.
    """
    rows, size = logits.shape
    tiles = triton.cdiv(size, TILE)
    maxima, sums = torch.empty(2, rows, tiles, dtype=torch.float32, device=logits.device)
    likeliest = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    columns, partial = (sampling.keys, sampling.temperature, sampling.greedy), (maxima, sums, likeliest)
    shape = (size, logits.stride(0), tiles)
    _tile[(rows, tiles)](logits, slots, sampling.temperature, *partial, *shape, TILE=TILE, num_warps=8)
    _pick[(rows,)](
        logits, slots, counts, *columns, *partial, newest, results[0], results[1].view(torch.float32), *shape,
        TILE=TILE, TILES=triton.next_power_of_2(tiles), num_warps=8,
    )  # fmt: skip
