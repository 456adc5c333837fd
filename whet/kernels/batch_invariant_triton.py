# SPDX-License-Identifier: Apache-2.0
"""Triton kernels whose tile shape is the same for every batch, so a token's results do not depend on the other tokens.

Attention reads the keys of a sequence tile by tile from its beginning. A table gives the places of the keys, in the
blocks of a cache or among packed tokens. The references in torch are `paged_attention.reference` and
`varlen_attention.reference`."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from whet.kernels.tiles import tile_tokens

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU: the host passes the bound of loops
KEYS, WARPS, STAGES = 64, 4, 2  # of attention: a program reads KEYS keys at once
# Of products: rows, columns (WIDE if a weight has MANY_COLUMNS or more, else NARROW) and depth of a tile.
PRODUCT_ROWS, NARROW, WIDE, DEPTH, MANY_COLUMNS = 64, 64, 128, 64, 4096
NORM_TILE = 1024  # numbers that a program of a norm reads, in whole rows


@triton.jit
def _attend(
    query, keys, values, table, tiles, out, sums,
    scale, window, cap, bound, tokens, query_row, query_head, key_row, key_head, value_row, value_head, table_row,
    KV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, N: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Computes softmax(query keys^T) values for the tokens of one tile and the query heads of one key head."""
    tile, head = tl.program_id(0) * 4, tl.program_id(1)
    begin, count = tl.load(tiles + tile), tl.load(tiles + tile + 1).to(tl.int32)
    own_table, first = table + tl.load(tiles + tile + 2) * table_row, tl.load(tiles + tile + 3).to(tl.int32)
    m, d, j = tl.arange(0, TOKENS * GP), tl.arange(0, DP), tl.arange(0, N)
    token, g, has = begin + m // GP, m % GP, d < D
    at, asks = first + m // GP, (m // GP < count) & (g < G)
    there = asks[:, None] & has[None, :]
    heads = (head * G + g)[:, None]
    q = tl.load(query + token[:, None] * query_row + heads * query_head + d[None, :], mask=there, other=0.0)
    most, total = tl.full([TOKENS * GP], -1e30, tl.float32), tl.zeros([TOKENS * GP], tl.float32)
    seen = tl.zeros([TOKENS * GP, DP], tl.float32)
    low, last = first * 0, first + count
    if WINDOWED:
        low = tl.maximum(first - window + 1, 0) // N * N
    for start in range(0, bound if INTERPRETED else last - low, N):
        place = low + start + j
        inside = place < last
        block = tl.load(own_table + place // BLOCK, mask=inside, other=0).to(tl.int64)
        index = (block * BLOCK + place % BLOCK)[:, None]
        mask = inside[:, None] & has[None, :]
        k = tl.load(keys + index * key_row + head * key_head + d[None, :], mask=mask, other=0.0)
        scores = tl.dot(q.to(k.dtype), tl.trans(k), input_precision="ieee") * scale
        if CAPPED:
            scores = cap * (2 / (1 + tl.exp(-2 * scores / cap)) - 1)
        sees = place[None, :] <= at[:, None]
        if WINDOWED:
            sees = sees & (place[None, :] > at[:, None] - window)
        scores = tl.where(sees, scores, -1e30)
        larger = tl.maximum(most, tl.max(scores, 1))
        shrink, p = tl.exp(most - larger), tl.where(sees, tl.exp(scores - larger[:, None]), 0.0)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(values + index * value_row + head * value_head + d[None, :], mask=mask, other=0.0)
        seen = seen * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        most = larger
    result = (seen / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + token[:, None] * (KV * G * D) + heads * D + d[None, :], result, mask=there)
    tl.store(sums + (head * G + g) * tokens + token, most + tl.log(total), mask=asks)


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, tiles: torch.Tensor,
    form: tuple[float, int, float], block: int, bound: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Computes softmax(form(query keys^T)) values, causal, and the log-sum-exp of scores: [T, H, D], [H, T] float32.

    query [T, H, D]; keys and values [K, KV, D]. table [S, W] has the numbers of a sequence's blocks of `block` keys; if
    `block` is 1, table [W] has the number of each key. tiles [n, 4] come from `tiles.tiles_of`, called with rows of the
    table. form is the scale, window and cap of `Scores`. No sequence has more than `bound` keys."""
    (tokens, heads, dim), kv_heads, (scale, window, cap) = query.shape, keys.shape[1], form
    group = heads // kv_heads
    query, keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (query, keys, values))
    out = torch.empty(tokens, heads, dim, dtype=query.dtype, device=query.device)
    sums = torch.empty(heads, tokens, dtype=torch.float32, device=query.device)
    _attend[(len(tiles), kv_heads)](
        query, keys, values, table, tiles, out, sums, scale, window, cap, bound, tokens,
        *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2], table.stride(0),
        KV=kv_heads, G=group, GP=triton.next_power_of_2(group), D=dim, DP=max(16, triton.next_power_of_2(dim)),
        TOKENS=tile_tokens(heads, kv_heads), BLOCK=block, N=KEYS,
        WINDOWED=window > 0, CAPPED=cap > 0, INTERPRETED=INTERPRETED, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    return out, sums


@triton.jit(do_not_specialize=["rows"])
def _product(
    x, weight, bias, out, rows, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, GROUP: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Computes a tile of x weight^T + bias. Products are always summed in the same order."""
    group = tl.program_id(0) // (GROUP * tl.cdiv(COLUMNS, N))  # GROUP tiles of rows read the same tiles of the weight
    number = tl.program_id(0) % (GROUP * tl.cdiv(COLUMNS, N))
    together = tl.minimum(tl.cdiv(rows, M) - group * GROUP, GROUP)
    row = (group * GROUP + number % together).to(tl.int64) * M + tl.arange(0, M)
    column = (number // together).to(tl.int64) * N + tl.arange(0, N)
    total = tl.zeros([M, N], tl.float32)
    for start in range(0, DEPTH, K):
        k = start + tl.arange(0, K)
        inside = (k < DEPTH) | (DEPTH % K == 0)
        a_at, b_at = row[:, None] * DEPTH + k[None, :], column[None, :] * DEPTH + k[:, None]
        a = tl.load(x + a_at, mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        b = tl.load(weight + b_at, mask=inside[:, None] & (column < COLUMNS)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if BIASED:
        total += tl.load(bias + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    there = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    tl.store(out + row[:, None] * COLUMNS + column[None, :], total.to(out.dtype.element_ty), mask=there)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes x weight^T + bias: [..., K], [N, K], [N] -> [..., N]. The tile size depends only on N."""
    x, weight, (columns, depth) = x.contiguous(), weight.contiguous(), weight.shape
    out, rows = x.new_empty(*x.shape[:-1], columns), x.numel() // depth
    wide = WIDE if columns >= MANY_COLUMNS else NARROW
    _product[(triton.cdiv(rows, PRODUCT_ROWS) * triton.cdiv(columns, wide),)](
        x, weight, weight if bias is None else bias, out, rows, COLUMNS=columns, DEPTH=depth, M=PRODUCT_ROWS, N=wide,
        K=DEPTH, GROUP=8, BIASED=bias is not None, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _normalise(x, weight, out, scales, rows, eps, SIZE: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr):
    """Computes RMSNorm of some rows: x / sqrt(mean(x^2) + eps) weight."""
    row, i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, TILE)
    there, at = (row < rows)[:, None] & (i < SIZE)[None, :], row[:, None] * SIZE + i[None, :]
    wide = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(wide * wide, 1) / SIZE + eps))
    unit = (wide * scale[:, None]).to(x.dtype.element_ty).to(tl.float32)
    found = unit * tl.load(weight + i, mask=i < SIZE, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, found.to(out.dtype.element_ty), mask=there)
    tl.store(scales + row, scale, mask=row < rows)


def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `fused.normalise` with a result in the weight's dtype."""
    x, size = x.contiguous(), x.shape[-1]
    out, scales = torch.empty_like(x, dtype=weight.dtype), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    rows, tile = x.numel() // size, triton.next_power_of_2(size)
    together = max(1, NORM_TILE // tile)
    _normalise[(triton.cdiv(rows, together),)](
        x, weight, out, scales, rows, eps, SIZE=size, TILE=tile, ROWS=together, num_warps=8 if tile > NORM_TILE else 4
    )
    return out, scales
