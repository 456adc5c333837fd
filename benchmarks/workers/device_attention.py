# SPDX-License-Identifier: Apache-2.0
"""Times torch's attention on the accelerator, forward and backward, for grouped and for repeated heads, between which
`whet.models.attention` chooses."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch
from torch.nn.functional import scaled_dot_product_attention

from whet import devices

ROWS, HEADS, GROUPS, SIZE = 16, 16, 8, 64
CASES = ((512, 512), (384, 512), (387, 509))  # queries and keys; fewer queries need a mask
ROUNDS = 7


def main() -> None:
    """Prints a table: milliseconds, the median of seven."""
    print("| dtype | queries, keys | in groups | repeated |\n|---|---|---|---|")
    for dtype in (torch.float32, torch.bfloat16):
        for length, seen in CASES:
            times = [f"{milliseconds(dtype, length, seen, repeats=each):.2f} ms" for each in (False, True)]
            print(f"| {str(dtype).removeprefix('torch.')} | {length}, {seen} | {' | '.join(times)} |", flush=True)


def milliseconds(dtype: torch.dtype, length: int, seen: int, *, repeats: bool) -> float:
    """Of one pass."""
    device = devices.here()
    shapes = ((HEADS, length), (GROUPS, seen), (GROUPS, seen))
    given = [torch.randn(ROWS, *shape, SIZE, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
    at = torch.arange(seen, device=device)
    mask = None if length == seen else (at[seen - length :, None] >= at)[None, None].repeat(ROWS, 1, 1, 1)
    found = []
    for _ in range(2 + ROUNDS):
        start = perf_counter()
        query, *others = given
        key, value = (each.repeat_interleave(HEADS // GROUPS, 1) if repeats else each for each in others)
        out = scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=not repeats)
        out.sum().backward()  # type: ignore[no-untyped-call]
        if device != devices.HOST:
            torch.accelerator.synchronize()
        found.append(1000 * (perf_counter() - start))
    return median(found[2:])


if __name__ == "__main__":
    main()
