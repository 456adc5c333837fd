# SPDX-License-Identifier: Apache-2.0
"""The batch that functions are measured on: groups of 16, answers of any length, tools between the tokens for gae."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP, TURN = 16, 64  # rows; tokens between two texts of a tool, which are as long


def columns_for(kind: str, name: str, shape: list[int]) -> dict[str, Tensor]:
    """The columns that the function reads, always with the same numbers."""
    rows, positions = shape
    draw = torch.Generator().manual_seed(0)
    mask = torch.arange(positions) < torch.randint(1, positions + 1, (rows, 1), generator=draw)
    if name == "gae":
        mask &= (torch.arange(positions) // TURN) % 2 == 0
    columns = {"response_mask": mask.long()}

    def normal() -> Tensor:
        return torch.randn(rows, positions, generator=draw).mul_(mask)

    if kind != "loss":
        columns |= {"token_level_rewards": normal(), "values": normal()} if name == "gae" else {}
        columns.setdefault("token_level_rewards", normal())
        uid = torch.arange(rows) // GROUP
        return {**columns, "uid": uid[torch.randperm(rows, generator=draw)]}
    columns["old_log_probs"] = normal().abs_().neg_()
    columns["log_probs"] = normal().mul_(0.1).add_(columns["old_log_probs"]).requires_grad_()
    columns["advantages"] = torch.randn(rows, 1, generator=draw) * mask
    return columns
