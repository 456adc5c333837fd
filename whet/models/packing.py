# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch as the model reads them, and the one place where states and tokens are shifted by one.

A batch row is [left padding | prompt | response | right padding]. The model reads only its real tokens, either packed
(all rows end to end, no padding at all) or padded (each row from the left edge, padding to its right). Both need a
causal mask alone: padding comes after everything that is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from whet.errors import DataError

# Attention sees rows of similar length together: the shortest of a bunch has this share of the longest's tokens, and
# all of them have no more than so many (query, key) pairs, which for few heads fit into a cache.
LEAST_SHARE, BUNCH_PAIRS = 0.8, 2**20


@dataclass(frozen=True)
class Grid:
    """Rows that stand beside one another among T tokens."""

    tokens: slice  # which of the T
    slots: torch.Tensor  # [tokens] each token's place in the grid [num_rows, width], flattened
    num_rows: int
    width: int

    def pad(self, flat: torch.Tensor) -> torch.Tensor:
        """[T, ...] -> [num_rows, width, ...] with zeros in the padding; differentiable."""
        grid = Pad.apply(flat[self.tokens], self.slots, self.num_rows * self.width)
        return grid.unflatten(0, (self.num_rows, self.width))

    def unpad(self, grid: torch.Tensor) -> torch.Tensor:
        """[num_rows, width, ...] -> [tokens, ...]; differentiable."""
        return Unpad.apply(grid.flatten(0, 1), self.slots)


@dataclass(frozen=True)
class Layout(Grid):
    """T real tokens of the rows with at least one sampled token, the longest row first; N tokens were sampled."""

    input_ids: torch.Tensor  # [T]
    position_ids: torch.Tensor  # [T], or [3, T] for multimodal rotary positions
    states: torch.Tensor  # [N] index into the T tokens: the token after which the sampled one was chosen
    targets: torch.Tensor  # [N] the sampled token
    places: torch.Tensor  # [N] where it stands in the batch's [B, R], flattened
    shape: tuple[int, int]  # B, R
    bunches: tuple[Grid, ...]  # all T tokens, in order, by rows of similar length

    def to_columns(self, sampled: torch.Tensor) -> torch.Tensor:
        """[N] -> [B, R], zero where nothing was sampled; differentiable."""
        return Pad.apply(sampled, self.places, self.shape[0] * self.shape[1]).view(self.shape)


def layout(batch: Mapping[str, torch.Tensor]) -> Layout:
    """The layout of a batch with `input_ids`, `attention_mask`, `position_ids` [B, L] and `response_mask` [B, R].

    Raises: DataError when a response has no prompt token before it to be chosen after.
    """
    real = batch["attention_mask"].bool() & batch["response_mask"].bool().any(1, keepdim=True)
    by_length = real.sum(1).argsort(descending=True, stable=True)
    real, input_ids, response_mask = (x[by_length] for x in (real, batch["input_ids"], batch["response_mask"].bool()))
    prompt_width = input_ids.shape[1] - response_mask.shape[1]
    lengths = real.sum(1)
    lengths = lengths[lengths > 0]
    width = int(lengths.max()) if len(lengths) else 0
    within = real.cumsum(1)[real] - 1
    row_starts = torch.arange(len(lengths), device=input_ids.device).repeat_interleave(lengths) * width

    rows, columns = response_mask.nonzero(as_tuple=True)
    order = torch.full(real.shape, -1, device=input_ids.device)
    order[real] = torch.arange(len(within), device=input_ids.device)
    chosen_at = order[rows, prompt_width + columns]
    if len(rows) and bool(((within[chosen_at] == 0) | (chosen_at < 0)).any()):
        raise DataError("a sampled token has no token before it, or is masked as padding: every prompt needs one token")
    positions = batch["position_ids"][by_length]
    return Layout(
        tokens=slice(None),
        input_ids=input_ids[real],
        position_ids=positions[real] if positions.dim() == 2 else positions.transpose(0, 1)[:, real],
        slots=row_starts + within,
        num_rows=len(lengths),
        width=width,
        states=chosen_at - 1,
        targets=input_ids[rows, prompt_width + columns],
        places=by_length[rows] * response_mask.shape[1] + columns,
        shape=(response_mask.shape[0], response_mask.shape[1]),
        bunches=tuple(_bunches(lengths.tolist(), within)),
    )


def _bunches(lengths: Sequence[int], within: torch.Tensor) -> Iterator[Grid]:
    """Bunches of rows of falling `lengths`; `within` [T] is each token's place in its row."""
    row = token = 0
    while row < len(lengths):
        width, end = lengths[row], row
        while (
            end < len(lengths)
            and lengths[end] >= LEAST_SHARE * width
            and (end == row or (end + 1 - row) * width**2 <= BUNCH_PAIRS)
        ):
            end += 1
        tokens = slice(token, token + sum(lengths[row:end]))
        sizes = torch.tensor(lengths[row:end], device=within.device)
        starts = torch.arange(end - row, device=within.device).repeat_interleave(sizes) * width
        yield Grid(tokens, starts + within[tokens], end - row, width)
        row, token = end, tokens.stop


class Pad(torch.autograd.Function):
    """Rows of `flat` to their `slots` among `size`, zeros elsewhere. No slot is used twice: the gradient is a read."""

    @staticmethod
    def forward(ctx, flat: torch.Tensor, slots: torch.Tensor, size: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(slots)
        return flat.new_zeros((size, *flat.shape[1:])).index_copy_(0, slots, flat)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        (slots,) = ctx.saved_tensors
        return grad.index_select(0, slots), None, None


class Unpad(torch.autograd.Function):
    """The inverse of `Pad`."""

    @staticmethod
    def forward(ctx, padded: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(slots)
        ctx.size = padded.shape[0]
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # type: ignore[no-untyped-def]
        (slots,) = ctx.saved_tensors
        return grad.new_zeros((ctx.size, *grad.shape[1:])).index_copy_(0, slots, grad), None
