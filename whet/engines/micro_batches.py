# SPDX-License-Identifier: Apache-2.0
"""Rows in micro-batches that fit a token budget."""

from __future__ import annotations

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], max_tokens: int, *, packing: bool, block: int = 1) -> list[list[int]]:
    """Row indices by micro-batch: every row once, none of a micro-batch over `max_tokens` unless it is one block.

    Packed, a micro-batch costs its tokens; padded, its rows times its longest row. Rows are taken by length, so that
    padding inside the model's attention (and outside, where rows are padded) stays small. `block` consecutive rows stay
    together. Rows of length 0 cost nothing and are left out.
    """
    blocks = [list(range(start, min(start + block, len(lengths)))) for start in range(0, len(lengths), block)]
    blocks = [rows for rows in blocks if any(lengths[row] for row in rows)]
    blocks.sort(key=lambda rows: max(lengths[row] for row in rows), reverse=True)
    batches: list[list[int]] = []
    current: list[int] = []
    tokens = longest = 0
    for rows in blocks:
        tokens += sum(lengths[row] for row in rows)
        longest = max(longest, max(lengths[row] for row in rows))
        cost = tokens if packing else longest * (len(current) + len(rows))
        if current and cost > max_tokens:
            batches.append(current)
            current, tokens, longest = [], sum(lengths[row] for row in rows), max(lengths[row] for row in rows)
        current = current + rows
    return [*batches, current] if current else batches
