# SPDX-License-Identifier: Apache-2.0
"""Position ids of tokens: for rows, for packed rows and for decode steps. They have one axis, or three for media."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch

from whet.errors import DataError
from whet.types import Media


def position_ids(attention_mask: torch.Tensor, rows: Sequence[torch.Tensor | None] | None = None) -> torch.Tensor:
    """Numbers a row's real tokens from 0: [B, L] -> [B, L]. Left padding has 0, right padding the last number.

    With multimodal rotary positions [B, L] -> [B, 3, L] (time, height, width): `rows` holds for each row the positions
    [3, n] of its first n real tokens, from `rotary_positions`, or None. Text after them continues from the largest."""
    plain = (attention_mask.cumsum(1) - 1).clamp(min=0)
    if rows is None:
        return plain
    positions = plain[:, None].repeat(1, 3, 1)
    for number, row in enumerate(rows):
        if row is None:
            continue
        real = attention_mask[number].nonzero()[:, 0]
        count, after = row.shape[1], next_position(row)
        positions[number, :, real[:count]] = row
        positions[number, :, real[count:]] = after + torch.arange(len(real) - count)
        positions[number, :, real[-1] :] = positions[number, :, real[-1]][:, None]
    return positions


def next_position(positions: torch.Tensor) -> int:
    """Returns the position of the next token after tokens at positions [n] or [3, n]."""
    return int(positions.max()) + 1 if positions.numel() else 0


def rotary_positions(
    token_ids: Sequence[int], media: Sequence[Media], opening: int | None = None
) -> torch.Tensor | None:
    """Computes time, height and width [3, T] of each token, like `get_rope_index` of transformers' Qwen models. An
    image of 4 x 6 patches takes 6 positions. None for models that only count tokens, and without media.

    The first `opening` tokens (unset: all) are the prompt. Text after it continues from the largest position, also
    after a video, as in decoding.  Raises: DataError if patch tokens and media do not agree."""
    grids = [(grid, each.tokens.time_step) for each in media if each.tokens is not None for grid in each.tokens.grids]
    steps = [(grid, step) for grid, step in grids if step is not None]
    if not steps:
        return None
    places = list(chain.from_iterable(patches(token_ids, media)))
    walk, first = _Walk(len(token_ids), len(token_ids) if opening is None else opening), 0
    for (time, height, width), step in steps:
        walk.read_text(places[first])
        walk.read_grid(time, height, width, step)
        first += time * height * width
    walk.read_text(len(token_ids))
    return walk.positions


def patches(token_ids: Sequence[int], media: Sequence[Media]) -> list[list[int]]:
    """Finds the indices of the patch tokens of each media.  Raises: DataError if tokens and media do not agree."""
    measured = [each.tokens for each in media if each.tokens is not None]
    known = {each.token_id for each in measured}
    found = [place for place, token in enumerate(token_ids) if token in known]
    ends = list(accumulate(each.count for each in measured))
    if len(measured) < len(media) or (ends and ends[-1] != len(found)):
        expected = f"{ends[-1] if ends else 0}, the tokens of its {len(media)} media"
        raise DataError("media tokens", len(found), expected, "use text and media of one prompt, read for this model")
    return [found[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class _Walk:
    def __init__(self, length: int, opening: int) -> None:
        self.positions = torch.empty(3, length, dtype=torch.int64)
        self.opening = opening
        self.at = self.next = 0  # index of the next token, and its position

    def read_text(self, end: int) -> None:
        for stop in (min(end, self.opening), end):
            if stop > self.at:
                self.positions[:, self.at : stop] = self.next + torch.arange(stop - self.at)
                self.next, self.at = self.next + stop - self.at, stop
            if self.at == self.opening:
                self.next = next_position(self.positions[:, : self.at])

    def read_grid(self, time: int, height: int, width: int, step: float) -> None:
        times = (torch.arange(time) * step).long()
        axes = torch.meshgrid(times, torch.arange(height), torch.arange(width), indexing="ij")
        end = self.at + time * height * width
        self.positions[:, self.at : end] = self.next + torch.stack(axes).flatten(1)
        is_prompt = self.at < self.opening
        self.at = end
        self.next = self.next + max(height, width) if is_prompt else next_position(self.positions[:, :end])
