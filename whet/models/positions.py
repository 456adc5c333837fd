# SPDX-License-Identifier: Apache-2.0
"""Position ids, for rows of a batch and for tokens that are decoded after a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def position_ids(attention_mask: torch.Tensor, prompts: Sequence[torch.Tensor | None] | None = None) -> torch.Tensor:
    """[B, L] -> [B, L]: the real tokens of a row count from 0; padding is 0 before them and their last after them.

    With multimodal rotary positions [B, L] -> [B, 3, L] (time, height, width): `prompts` are for each row the positions
    [3, n] of its first n real tokens, which follow from its images and videos, or None where it has none. Text after
    them goes on behind the largest, the same on all three axes, so that an image of 4 x 6 patches takes 6 positions.
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
    """The position of the first token after a prompt with positions [n] or [3, n]; the next tokens count on from it."""
    return int(prompt.max()) + 1 if prompt.numel() else 0
