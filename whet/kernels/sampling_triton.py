# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that sample tokens in one pass over the logits, on an accelerator. The reference in torch is
`sampling.sample`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from whet.kernels.sampling import SamplingState

TILE = 4096  # tokens of the vocabulary that one program reads


@triton.jit
def _tile(logits, slots, temperature, maxima, sums, likeliest, V, stride, tiles, TILE: tl.constexpr):
    """Reduces a tile of logits / temperature to its largest value, the index of this value, and the sum of
    exp(. - largest)."""
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
    """Computes the random number of `sampling.uniforms`."""
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
    """Samples one row: finds the tile, then the token at which the cumulated probability exceeds the uniform number."""
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
    """Computes `sampling.sample` for rows without min-p, top-k, top-p and constraints. `slots` [B] is each row's index
    in the columns of `sampling` and in `newest`, which also gets the token.
    logits [B, V]; counts [B] tokens sampled before; results [2, B] int32 gets the tokens, and the bits of their
    log-probs. Sums are float32, tile by tile: within 1e-5 of a boundary the result may be the next token."""
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
