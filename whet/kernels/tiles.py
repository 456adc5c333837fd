# SPDX-License-Identifier: Apache-2.0
"""Tiles of tokens of one size, for attention that computes a token in the same way in any batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

TILE_ROWS = 64


def tile_tokens(heads: int, kv_heads: int) -> int:
    """Tokens of a tile of attention, whose rows are tokens times heads of one head of keys."""
    return max(1, TILE_ROWS // power_of_two(heads // kv_heads))


def tiles_of(
    lengths: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, tokens: int, least: int = 0
) -> torch.Tensor:
    """[n, 4] first token, number of tokens, row, and position of the first token, of tiles of at most `tokens` tokens
    of sequences that lie one after the other: their lengths, rows and first positions are [S]. Behind them come zeros,
    up to `least` tiles."""
    counts = (lengths + tokens - 1) // tokens
    owner = torch.arange(len(lengths)).repeat_interleave(counts)
    before = (torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]) * tokens
    first, many = (lengths.cumsum(0) - lengths)[owner] + before, (lengths[owner] - before).clamp(max=tokens)
    tiles = torch.stack([first, many, rows[owner], positions[owner] + before], 1)
    return F.pad(tiles, (0, 0, 0, max(0, least - len(tiles))))


def power_of_two(length: int) -> int:
    """The next one, so that what is compiled for a bound serves many batches."""
    return 1 << max(0, length - 1).bit_length()
