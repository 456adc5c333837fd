# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.short_rows`: whet's C++ kernels for a CPU against their references in torch.

A line has the median milliseconds of forward and of backward, in turn: of a gated MLP, and of attention over pairs of
rows with a shared prompt, all of one length, which needs the least padding. whet leaves rows of more than `MOST_KEYS`
keys to the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from whet.kernels import fused
from whet.kernels.attention import Scores
from whet.kernels.packed_attention import MOST_KEYS, ShortRows, _ShortAttention, padded_attention
from whet.models.packing import layout

ROUNDS, TOKENS = 21, 1000  # of a batch, about
HEADS, KV_HEADS = 8, 2
ROWS = ((16, 32), (32, 32), (32, 64), (64, 64), (96, 64), (128, 64))  # keys, numbers of a head


def main() -> None:
    """Prints the table."""
    limits = ", ".join(f"{most} keys in {str(dtype).removeprefix('torch.')}" for dtype, most in MOST_KEYS.items())
    print(f"{torch.get_num_threads()} threads; whet's attention is used up to {limits}\n")
    print("| | whet: forward | backward | torch: forward | backward |\n|---|--:|--:|--:|--:|")
    for dtype in MOST_KEYS:
        gate, up, grad = (torch.randn(TOKENS, 512, dtype=dtype) for _ in range(3))
        calls = [
            partial(fused.silu_gate, gate, up),
            partial(fused.silu_gate_gradients, grad, gate, up),
            partial(fused.reference_silu_gate, gate, up),
            partial(fused.reference_silu_gate_gradients, grad, gate, up),
        ]
        _line("MLP of 512", dtype, calls)
    for keys, dim in ROWS:
        for dtype in MOST_KEYS:
            _line(f"{keys} keys, heads of {dim}", dtype, _attention(keys, dim, dtype))


def _attention(keys: int, dim: int, dtype: torch.dtype) -> list[Callable[[], Any]]:
    """Forward and backward of the kernel, and of attention over padded rows."""
    half, rows = keys // 2, 2 * (TOKENS // (2 * keys))
    mask, ids = torch.ones(rows, keys, dtype=torch.long), torch.randint(3, 100, (rows, keys))
    ids[1::2, :half] = ids[::2, :half]
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1}
    where, scores = layout({**columns, "response_mask": mask[:, half:]}, share_prompts=True), Scores(dim**-0.5)
    shapes = ((HEADS, dim), (KV_HEADS, dim), (KV_HEADS, dim))
    query, key, value = (torch.randn(len(where.input_ids), *each, dtype=dtype).requires_grad_() for each in shapes)
    calls: list[Callable[[], Any]] = []
    for forward in (
        partial(_ShortAttention.apply, query, key, value, ShortRows.of(where.bunches), scores),
        partial(padded_attention, query, key, value, scores, where.bunches),
    ):
        out = forward()
        backward = partial(torch.autograd.grad, out, (query, key, value), torch.randn_like(out), retain_graph=True)
        calls += [forward, backward]
    return calls


def _line(name: str, dtype: torch.dtype, calls: Sequence[Callable[[], Any]]) -> None:
    spent: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for call, seconds in zip(calls, spent, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    cells = " | ".join(f"{1000 * median(each):.2f}" for each in spent)
    print(f"| {name}, {str(dtype).removeprefix('torch.')} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
