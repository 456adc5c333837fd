# SPDX-License-Identifier: Apache-2.0
"""Masking of columns [B, R]: sets tokens that the policy did not sample to 0, so that their values have no effect.

Tensors are typed as Any, since the registry, which must work without torch, uses this module.
"""

from __future__ import annotations

from typing import Any

CACHED = 2**19  # numbers in a block that fits into a CPU's cache


def row_blocks(x: Any) -> list[slice]:
    """Slices of rows, on a CPU so small that a block of them fits into its cache; elsewhere one slice of all rows."""
    rows = len(x) if x.device.type != "cpu" else max(1, CACHED * len(x) // max(1, x.numel()))
    return [slice(start, start + rows) for start in range(0, len(x), max(1, rows))]


def zero_outside(column: Any, mask: Any) -> Any:
    """`column` with 0 where `mask` is 0; without a copy if it is already so.   [B, R, ...], [B, R]"""
    mask = mask.reshape(*mask.shape, *[1] * (column.dim() - mask.dim()))
    if column.device.type == "cpu":  # elsewhere the host would have to wait for the test
        values = column.detach()
        outside = ((values[rows] != 0) & (mask[rows] == 0) for rows in row_blocks(values))
        # A maximum of bytes is many times faster than torch's own `any`.
        if not any(flags.numel() and bool(flags.byte().amax()) for flags in outside):
            return column
    return column.masked_fill(mask == 0, 0.0)
