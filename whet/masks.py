# SPDX-License-Identifier: Apache-2.0
"""Columns [B, R] and their mask: what stands where the policy sampled nothing never matters.

Tensors are typed as Any here: the registry, which has to be read without torch, uses this.
"""

from __future__ import annotations

from typing import Any

CACHED = 2**19  # numbers of a block that stays in a CPU's cache


def row_blocks(x: Any) -> list[slice]:
    """Slices of rows so small that a CPU's cache holds what is computed between them; all rows at once elsewhere."""
    rows = len(x) if x.device.type != "cpu" else max(1, CACHED * len(x) // max(1, x.numel()))
    return [slice(start, start + rows) for start in range(0, len(x), max(1, rows))]


def zero_outside(column: Any, mask: Any) -> Any:
    """`column` with 0 where `mask` is 0; itself, and no copy, where it is so already.   [B, R, ...], [B, R]"""
    mask = mask.reshape(*mask.shape, *[1] * (column.dim() - mask.dim()))
    if column.device.type == "cpu":  # elsewhere looking would mean waiting
        values = column.detach()
        if not any(_any((values[rows] != 0) & (mask[rows] == 0)) for rows in row_blocks(values)):
            return column
    return column.masked_fill(mask == 0, 0.0)


def _any(flags: Any) -> bool:
    """Tells whether one of the flags is set; a maximum of bytes is many times faster than torch's own `any`."""
    return bool(flags.numel()) and bool(flags.byte().amax())
