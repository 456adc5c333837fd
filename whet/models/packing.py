# SPDX-License-Identifier: Apache-2.0
"""The layout of a batch for the model. Only this file shifts states and tokens by one.

A batch row is [left padding | prompt | response | right padding]. The model reads only its real tokens, either packed
(rows concatenated, without padding) or padded (each row from the left edge, padding on its right). Both need only a
causal mask, because padding comes after all real tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from whet.devices import moved
from whet.errors import DataError
from whet.kernels.delta_rule import PackedFlow
from whet.kernels.packed_attention import ShortRows, SpreadTokens, Unpad, padded
from whet.kernels.varlen_attention import TOKENS_STEP, Stretches, rounded
from whet.types import Media

# Attention runs on bunches of rows of similar length: the shortest row has at least MIN_FRACTION of the longest's
# tokens, and a bunch has at most BUNCH_PAIRS (query, key) pairs, which for few heads fit into a cache.
MIN_FRACTION, BUNCH_PAIRS = 0.8, 2**20
# With at most FEW_PAIRS pairs, rows of any length share a bunch: another bunch would cost more than their padding.
FEW_PAIRS = 2**16
# On a CPU each new shape of a bfloat16 product is compiled, which takes longer than a small product. Counts of tokens
# and rows, and widths, are padded to multiples, so that few different shapes occur.
ROWS_STEP, WIDTH_STEP = 16, 16
# Columns that must agree for two prompts to be the same, beside their media (a tuple for each row).
PROMPT_COLUMNS, MEDIA, LATER_MEDIA = ("input_ids", "attention_mask", "position_ids"), "media", "response_media"
ROUTED = "routed_experts"
Columns = Mapping[str, Any]
Ring = Callable[[int], tuple[torch.Tensor, torch.Tensor]]  # see `TokenShare.ring`


@dataclass(frozen=True)
class Grid:
    """Maps between a packed sequence of T tokens and a padded tensor [num_rows, width, ...] of some of its rows."""

    tokens: slice  # the tokens of these rows among the T tokens
    slots: torch.Tensor  # [tokens] each token's index in the flattened grid [num_rows, width]
    num_rows: int
    width: int

    def pad(self, flat: torch.Tensor) -> torch.Tensor:
        """Copies tokens into the padded tensor: [T, ...] -> [num_rows, width, ...], 0 in padding; differentiable."""
        grid = padded(flat[self.tokens], self.slots, self.num_rows * self.width)
        return grid.unflatten(0, (self.num_rows, self.width))

    def unpad(self, grid: torch.Tensor) -> torch.Tensor:
        """Copies tokens out of the padded tensor: [num_rows, width, ...] -> [tokens, ...]; differentiable."""
        return Unpad.apply(grid.flatten(0, 1), self.slots)


@dataclass(frozen=True)
class Bunch(Grid):
    """Rows of similar length for one call of attention. Queries are a row's own tokens; keys include its shared prompt.

    A row's keys are [padding | the shared prompt | its own tokens | padding]. The own tokens of a row without a shared
    prompt include its prompt.
    """

    prefix_tokens: torch.Tensor  # [P] index of shared prompts' tokens among the T, repeated for each row
    prefix_slots: torch.Tensor  # [P] their index in the flattened grid of keys [num_rows, prefix_width + width]
    prefix_lengths: torch.Tensor  # [num_rows] number of tokens of each row's shared prompt
    prefix_width: int  # the largest of these numbers, padded
    has_gaps: bool  # True if any number is smaller than the width
    query_runs: torch.Tensor | None = None  # [num_rows, width] see `Layout.with_runs`
    key_runs: torch.Tensor | None = None  # [num_rows, prefix_width + width]

    def places(self, with_prompts: bool) -> tuple[torch.Tensor, int]:
        """Returns each own token's index in the flattened grid of keys (`with_prompts`) or queries; and its width."""
        if not with_prompts:
            return self.slots, self.width
        return self.slots + (self.slots // self.width + 1) * self.prefix_width, self.prefix_width + self.width

    @cached_property
    def hidden(self) -> torch.Tensor:
        """The mask [num_rows or 1, width, prefix_width + width], True for a key to which a query must not attend."""
        at = torch.arange(self.prefix_width + self.width, device=self.slots.device)
        later = at > at[self.prefix_width :, None]
        absent = self.prefix_width - self.prefix_lengths
        if self.query_runs is not None and self.key_runs is not None:
            queries, keys = self.query_runs[:, :, None], self.key_runs[:, None]
            later = later & ((queries != keys) | (queries == 0))
        return (later | (at < absent[:, None, None])) if self.has_gaps else later if later.dim() == 3 else later[None]


@dataclass(frozen=True)
class Layout(Grid):
    """The packed tokens of a batch: T real tokens of the rows with a sampled token, longest row first; N were sampled.

    The tokens of a shared prompt belong to its first row; the other rows with this prompt begin after it."""

    input_ids: torch.Tensor  # [T]
    position_ids: torch.Tensor  # [T], or [3, T] for multimodal rotary positions
    states: torch.Tensor  # [N] index into the T tokens: the token before the sampled one
    targets: torch.Tensor  # [N] the sampled token
    places: torch.Tensor  # [N] index of the sampled token in the batch's flattened [B, R]
    shape: tuple[int, int]  # B, R
    before: torch.Tensor  # [T] each token's predecessor in its row, which may be in a shared prompt; -1 for the first
    bunches: tuple[Bunch, ...]  # all T tokens, in order, in bunches of rows of similar length; empty with `stretches`
    media: tuple[Media, ...] = ()  # the media whose patches are among the T tokens, in order
    stretches: Stretches | None = None  # the layout for attention in one kernel call
    routed: torch.Tensor | None = None  # [T, layers, k] experts to replay; -1: the router chooses
    ring_order: torch.Tensor | None = None  # [n] order of this row of ranks' tokens (`TokenShare`): see `_in_ring`

    @property
    def size(self) -> int:
        """The number of packed tokens with padding; T is the number without padding."""
        return rounded(len(self.input_ids), TOKENS_STEP)

    def to(self, device: torch.device) -> Layout:
        """Copies the layout to another device, all indices in one transfer."""
        if self.input_ids.device.type == device.type:
            return self
        grids: list[Any] = [self, *self.bunches, *([] if self.stretches is None else [self.stretches])]
        named = [
            [(each.name, value) for each in fields(grid) if isinstance(value := vars(grid)[each.name], torch.Tensor)]
            for grid in grids
        ]
        tensors = [value for each in named for _, value in each]
        there = moved(torch.cat([value.flatten() for value in tensors]), device)
        parts = iter(there.split([value.numel() for value in tensors]))
        whole, *others = (
            replace(grid, **{name: next(parts).view(value.shape).to(value.dtype) for name, value in each})
            for grid, each in zip(grids, named, strict=True)
        )
        stretches = None if self.stretches is None else others.pop()
        return replace(whole, bunches=tuple(others), stretches=stretches)

    def with_runs(self, token_ids: Sequence[int]) -> Layout:
        """Returns a layout in which the tokens of each run of `token_ids` (an image or a video) attend to each other in
        both directions. Only for a layout without `stretches`."""
        is_media = torch.isin(self.input_ids, self.input_ids.new_tensor(token_ids))
        begins = is_media & ~torch.nn.functional.pad(is_media, (1, -1))
        runs = begins.cumsum(0) * is_media  # number of the run; 0 for tokens outside of runs
        grids = zip(
            SpreadTokens.apply(runs, self.bunches, False), SpreadTokens.apply(runs, self.bunches, True), strict=True
        )
        bunches = (replace(each, query_runs=q, key_runs=k) for each, (q, k) in zip(self.bunches, grids, strict=True))
        return replace(self, bunches=tuple(bunches))

    @cached_property
    def flow(self) -> PackedFlow:
        """The order of the tokens for layers that pass a state from token to token."""
        return PackedFlow.of(self.before, self.size)

    @cached_property
    def short_rows(self) -> ShortRows:
        """The rows for the kernel for short rows."""
        return ShortRows.of(self.bunches)

    @cached_property
    def sampled_by_row(self) -> torch.Tensor:
        """Counts the sampled tokens of each row, [num_rows]."""
        return torch.unique_consecutive(self.places // self.shape[1], return_counts=True)[1]

    def at_ends(self, pad_token_id: int | None) -> Layout:
        """Returns a layout for reward models, with one place a row: the last sampled token, whose state is the state of
        the row's last token (as in transformers, the last token that is not `pad_token_id`)."""
        index = torch.arange(len(self.input_ids), device=self.input_ids.device)
        if pad_token_id is not None:
            index = torch.where(self.input_ids == pad_token_id, -1, index)
        last = torch.full((self.num_rows,), -1, device=index.device)
        last = last.scatter_reduce(0, self.slots // self.width, index, "amax")
        after = self.sampled_by_row.cumsum(0)
        states = torch.where(last < 0, self.states[after - self.sampled_by_row], last)
        return replace(self, states=states, targets=self.input_ids[states], places=self.places[after - 1])

    def to_columns(self, sampled: torch.Tensor) -> torch.Tensor:
        """Puts values of sampled tokens into columns: [N, ...] -> [B, R, ...], 0 elsewhere; differentiable."""
        return padded(sampled, self.places, self.shape[0] * self.shape[1]).view(*self.shape, *sampled.shape[1:])


def layout(
    batch: Columns,
    share_prompts: bool = False,
    in_stretches: bool = False,
    tile: int = 0,
    ring: Ring | None = None,
    ends: bool = True,
) -> Layout:
    """Builds the layout of a batch with `input_ids`, `attention_mask`, `position_ids` [B, L] and `response_mask` [B,
    R], on their device: usually the host, before the batch is copied to another device.

    Without `ends` a row's last sampled token and all later ones are left out: only reward models read their states.
    With `share_prompts` a prompt is computed once for all its rows, since later tokens do not change it. `in_stretches`
    is for attention in one call over all rows, `tile` tokens at once, without bunches. With `ring`, the queries are the
    tokens of a row of ranks (`_in_ring`).  Raises: DataError for a sampled token without a token before it."""
    response_mask = batch["response_mask"].bool()
    prompt_width = batch["input_ids"].shape[1] - response_mask.shape[1]
    kept = response_mask.any(1).nonzero()[:, 0]
    row_at = torch.arange(len(kept), device=kept.device)
    first = _first_rows(batch, kept) if share_prompts else row_at
    present, real, own = _tokens_of(batch, kept, first, ends or LATER_MEDIA in batch)

    by_length = own.sum(1).argsort(descending=True, stable=True)
    has_prompt = (first == row_at)[by_length].tolist()
    kept, present, real, own = (each[by_length] for each in (kept, present, real, own))
    first = by_length.argsort()[first[by_length]]
    input_ids, response_mask = batch["input_ids"][kept], response_mask[kept]
    lengths, prefix_lengths = own.sum(1), (real & ~own).sum(1)
    index = torch.full(real.shape, -1, device=real.device)  # index of each real token among the T
    index[own] = torch.arange(int(lengths.sum()), device=real.device)
    index = torch.where(own, index, index[first])
    in_order, order = torch.full(real.shape, -1, device=real.device), real.cumsum(1) - 1  # the same without the gaps
    in_order[real.nonzero()[:, 0], order[real]] = index[real]

    rows, columns = response_mask.nonzero(as_tuple=True)
    chosen_at = (real.cumsum(1) - real.long())[rows, prompt_width + columns]
    if bool(((chosen_at == 0) | ~present[rows, prompt_width + columns]).any()):
        raise DataError("sampled token", "has none before it, or is padding", "a prompt of at least one token")
    width, within = int(lengths.max()) if len(lengths) else 0, own.cumsum(1)[own] - 1
    positions, slots, ring_order = batch["position_ids"][kept], row_at.repeat_interleave(lengths) * width + within, None
    pieces = [lengths, prefix_lengths, within, in_order]
    if ring is not None:
        ring_order, *pieces = _in_ring(*ring(len(slots)), slots // width, *pieces)
    return Layout(
        tokens=slice(None),
        input_ids=input_ids[own],
        position_ids=positions[own] if positions.dim() == 2 else positions.transpose(0, 1)[:, own],
        slots=slots,
        num_rows=len(lengths),
        width=width,
        states=in_order[rows, chosen_at - 1],
        targets=input_ids[rows, prompt_width + columns],
        places=kept[rows] * response_mask.shape[1] + columns,
        shape=(batch["response_mask"].shape[0], response_mask.shape[1]),
        before=_before(in_order).gather(1, order.clamp(min=0))[own],
        bunches=() if in_stretches else tuple(_bunches(*pieces)),
        media=tuple(_media(batch, kept.tolist(), has_prompt)),
        stretches=Stretches.of(pieces[0], pieces[1], pieces[3], tile) if in_stretches and len(pieces[0]) else None,
        ring_order=ring_order,
    )


def _tokens_of(
    batch: Mapping[str, Any], kept: torch.Tensor, first: torch.Tensor, ends: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Finds the tokens of the rows `kept` that are present, that the model reads, and that it reads in this row and not
    in the `first` row with its prompt. Without `ends` it leaves out tokens without a later sampled token, except in
    rows that would have no own token.   3 x [rows, L]"""
    sampled, present = batch["response_mask"].bool()[kept], batch["attention_mask"].bool()[kept]
    own, width = present.clone(), present.shape[1] - sampled.shape[1]
    own[first != torch.arange(len(kept), device=kept.device), :width] = False
    if ends:
        return present, present, own
    has_later = sampled.flip(1).cumsum(1).flip(1) > sampled.long()
    unread = own & ~torch.nn.functional.pad(has_later, (width, 0), value=True)
    unread &= (own & ~unread).any(1, keepdim=True)
    return present, present & ~unread, own & ~unread


def _before(in_order: torch.Tensor) -> torch.Tensor:
    """Returns the predecessor of each token in a row, -1 for the first.   [rows, L] -> [rows, L]"""
    return torch.nn.functional.pad(in_order, (1, -1), value=-1)


def with_routed(where: Layout, routed: torch.Tensor) -> Layout:
    """Returns the layout with experts to replay. `routed` [B, R, layers, k] has for each sampled token the experts that
    the rollout used when it predicted the token, which is when it read the token before it."""
    experts = routed.new_full((len(where.input_ids), *routed.shape[2:]), -1)
    experts[where.states] = routed.flatten(0, 1)[where.places]
    return replace(where, routed=experts)


def _first_rows(batch: Mapping[str, Any], kept: torch.Tensor) -> torch.Tensor:
    """Returns for each of the rows `kept` the first row with the same prompt, as indices into `kept`."""
    media = {MEDIA: [batch[MEDIA][row] for row in kept.tolist()]} if MEDIA in batch else {}
    return same_prompt({name: batch[name][kept] for name in ("response_mask", *PROMPT_COLUMNS)} | media)


def _in_ring(
    tokens: torch.Tensor,
    places: torch.Tensor,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    prefix_lengths: torch.Tensor,
    within: torch.Tensor,
    in_order: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Returns the layout of attention for `tokens` [n] of a row of ranks. A piece is a run of these tokens in a row;
    its prefix is all tokens before it. Keys are the n tokens in the returned order, then all T at `places` [T].

    rows [T], within [T]: each token's row, and its index in the row.  Returns the order of the n tokens, by piece; then
    lengths, prefix_lengths, within and in_order of the pieces, as the arguments of these names have them for rows."""
    row, at = rows[tokens], within[tokens]
    starts = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device)
    starts[1:] = (row[1:] != row[:-1]) | (at[1:] != at[:-1] + 1)
    piece, first = starts.cumsum(0) - 1, starts.nonzero()[:, 0]
    counts = piece.bincount(minlength=len(first))
    by_length = counts.argsort(descending=True, stable=True)
    order, first = by_length.argsort()[piece].argsort(stable=True), first[by_length]
    counts, prefixes = counts[by_length], (prefix_lengths[row] + at)[first]
    begin = counts.cumsum(0) - counts
    index = torch.arange(in_order.shape[1], device=tokens.device)
    own = begin[:, None] + index - prefixes[:, None]
    others = places[in_order.clamp(min=0)] + len(tokens)
    pieces = torch.where(index < prefixes[:, None], others[row[first]], own)
    pieces = torch.where(index < (prefixes + counts)[:, None], pieces, -1)
    return (
        order,
        counts,
        prefixes,
        torch.arange(len(tokens), device=tokens.device) - begin.repeat_interleave(counts),
        pieces,
    )


def _media(batch: Mapping[str, Any], rows: Sequence[int], has_prompt: Sequence[bool]) -> Iterator[Media]:
    """Yields the media of rows in order. Skips the media of a prompt whose tokens belong to another row."""
    for row, has_own in zip(rows, has_prompt, strict=True):
        if has_own and MEDIA in batch:
            yield from batch[MEDIA][row]
        if LATER_MEDIA in batch:
            yield from batch[LATER_MEDIA][row]


def same_prompt(batch: Mapping[str, Any]) -> torch.Tensor:
    """Returns for each row [B] the first row with the same prompt: tokens, media, positions and padding."""
    rows, prompt_width = len(batch["input_ids"]), batch["input_ids"].shape[1] - batch["response_mask"].shape[1]
    prompts = [batch[name][..., :prompt_width].reshape(rows, -1) for name in PROMPT_COLUMNS]
    first: dict[tuple[bytes, object], int] = {}
    table, media = torch.cat(prompts, 1).cpu().numpy(), batch.get(MEDIA, [()] * rows)
    found = [first.setdefault((prompt.tobytes(), media[row]), row) for row, prompt in enumerate(table)]
    return torch.tensor(found, dtype=torch.int64, device=batch["input_ids"].device)


def _bunches(
    own_lengths: torch.Tensor, prefix_lengths: torch.Tensor, within: torch.Tensor, in_order: torch.Tensor
) -> Iterator[Bunch]:
    """Splits rows, which are sorted by decreasing length, into bunches. `within` [T] is each token's index in its row.

    own_lengths, prefix_lengths [rows]; in_order [rows, L]: indices of each row's tokens among the T, prompt first."""
    lengths, prefixes, device = own_lengths.tolist(), prefix_lengths.tolist(), within.device
    row = token = 0
    while row < len(lengths):
        width, end, deepest = lengths[row], row, 0
        while end < len(lengths):
            deeper = max(deepest, prefixes[end])
            limit = BUNCH_PAIRS if lengths[end] >= MIN_FRACTION * width else FEW_PAIRS
            if end > row and (end + 1 - row) * width * (deeper + width) > limit:
                break
            end, deepest = end + 1, deeper
        sizes, before = torch.tensor(lengths[row:end], device=device), prefix_lengths[row:end]
        tokens = slice(token, token + sum(lengths[row:end]))
        num_rows, width = rounded(end - row, ROWS_STEP), rounded(width, WIDTH_STEP)
        deepest = rounded(deepest, WIDTH_STEP)
        slots = torch.arange(end - row, device=device).repeat_interleave(sizes) * width + within[tokens]
        at = torch.arange(deepest, device=device)
        is_prefix = at >= deepest - before[:, None]
        source = (at - deepest + before[:, None]).clamp(min=0)
        before = torch.nn.functional.pad(before, (0, num_rows - len(before)))
        yield Bunch(
            tokens=tokens,
            slots=slots,
            num_rows=num_rows,
            width=width,
            prefix_tokens=in_order[row:end].gather(1, source)[is_prefix],
            prefix_slots=(torch.arange(end - row, device=device)[:, None] * (deepest + width) + at)[is_prefix],
            prefix_lengths=before,
            prefix_width=deepest,
            has_gaps=bool((before != deepest).any()),
        )
        row, token = end, tokens.stop
