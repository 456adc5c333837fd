# SPDX-License-Identifier: Apache-2.0
"""The batch that is sent: columns that a training step reads, of rows of any length."""

from __future__ import annotations

import torch
from torch import Tensor


def columns_of(rows: int, positions: int) -> dict[str, Tensor]:
    """Three columns of whole numbers over prompt and response, four of float32 over the response, which is as long as
    the prompt."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, positions + 1, (rows, 1), generator=draw)
    mask = (torch.arange(positions) < lengths).long()
    ids = torch.randint(1 << 15, (rows, positions), generator=draw).mul_(mask)
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1)}
    for name in ("old_log_probs", "ref_log_probs", "values", "advantages"):
        columns[name] = torch.randn(rows, positions // 2, generator=draw)
    return columns


def size_of(columns: dict[str, Tensor]) -> int:
    """Bytes."""
    return sum(column.nbytes for column in columns.values())
