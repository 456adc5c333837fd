# SPDX-License-Identifier: Apache-2.0
"""Position ids of the rows of a batch, and of the tokens decoded after a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def position_ids(attention_mask: torch.Tensor, prompts: Sequence[torch.Tensor | None] | None = None) -> torch.Tensor:
    """[B, L] -> [B, L]: a row's real tokens are numbered from 0; left padding has 0, right padding the last number.

    With multimodal rotary positions [B, L] -> [B, 3, L] (time, height, width): `prompts` holds for each row the
    positions [3, n] of its first n real tokens, computed from its images and videos, or None. Text after them continues
    from the largest, equal on all three axes, so an image of 4 x 6 patches takes 6 positions.
    """
    plain = (attention_mask.cumsum(1) - 1).clamp(min=0)
    if prompts is None:
        return plain
    positions = plain[:, None].repeat(1, 3, 1)
    for row, prompt in zip(range(len(plain)), prompts, strict=True):
        if prompt is None:
            continue
        real = attention_mask[row].nonzero()[:, 0]
        count, after = prompt.shape[1], next_position(prompt)
        positions[row, :, real[:count]] = prompt
        positions[row, :, real[count:]] = after + torch.arange(len(real) - count)
        positions[row, :, real[-1] :] = positions[row, :, real[-1]][:, None]
    return positions


def next_position(prompt: torch.Tensor) -> int:
    """Position of the first token after a prompt with positions [n] or [3, n]."""
    return int(prompt.max()) + 1 if prompt.numel() else 0
