# SPDX-License-Identifier: Apache-2.0
"""Tiles of a fixed number of tokens, for attention that computes a token in the same way in any batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

TILE_ROWS = 64


def tile_tokens(heads: int, kv_heads: int) -> int:
    """Returns the number of tokens in a tile. A tile's rows are its tokens times the query heads of a key head."""
    return max(1, TILE_ROWS // power_of_two(heads // kv_heads))


def tiles_of(
    lengths: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, tokens: int, least: int = 0
) -> torch.Tensor:
    """Builds tiles of at most `tokens` tokens, [n, 4]: first token, number of tokens, row, position of the first token.
    Sequences are stored one after another; `lengths`, `rows` and `positions` (of first tokens) are [S]. If there are
    fewer than `least` tiles, tiles of zeros are appended."""
    counts = (lengths + tokens - 1) // tokens
    owner = torch.arange(len(lengths)).repeat_interleave(counts)
    before = (torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]) * tokens
    first, many = (lengths.cumsum(0) - lengths)[owner] + before, (lengths[owner] - before).clamp(max=tokens)
    tiles = torch.stack([first, many, rows[owner], positions[owner] + before], 1)
    return F.pad(tiles, (0, 0, 0, max(0, least - len(tiles))))


def power_of_two(length: int) -> int:
    """Returns the least power of two that is at least `length`, so that compiled kernels serve many batches."""
    return 1 << max(0, length - 1).bit_length()
