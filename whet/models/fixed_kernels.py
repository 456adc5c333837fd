# SPDX-License-Identifier: Apache-2.0
"""Triton kernels with tiles of one shape, whatever the batch: a token's numbers do not depend on the other tokens.

Attention goes over the keys of a sequence in tiles from its beginning on, which a table finds, in the blocks of a cache
or among packed tokens. `paged_attention.reference` and `varlen.reference` say the same in torch.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from whet.models.packing import tile_tokens

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # on a CPU: loops take their bound from the host
KEYS, WARPS, STAGES = 64, 4, 2  # of attention: keys read at once by one program


@triton.jit
def _attend(
    query, keys, values, table, tiles, out, sums,
    scale, window, cap, bound, tokens, query_row, query_head, key_row, key_head, value_row, value_head, table_row,
    KV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, N: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attends the tokens of one tile by the heads of one head of keys: softmax(query keys^T) values."""
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
    """softmax(form(query keys^T)) values, causal, and the logs of the sums of exp: [T, H, D] and [H, T] float32.

    query [T, H, D]; keys and values [K, KV, D]; table [S, W] has the number of each `block` of keys of a sequence,
    or where `block` is 1 [W] that of each key; tiles [n, 4] as `packing.tiles_of` makes them, whose rows are those of
    the table; the form is that of `Scores`; no sequence has more than `bound` keys.
    """
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
