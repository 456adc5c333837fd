# SPDX-License-Identifier: Apache-2.0
"""Paged attention on an accelerator: torch's scaled_dot_product_attention over what the block table names.

Which blocks, slots and keys a batch of tokens means is worked out once for all layers, and the host waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from whet.models.attention import Scores, softmax
from whet.rollout.native.paged_attention import BLOCK_SIZE

GATHERED = 2**27  # numbers of keys that are read out of the cache at once
WIDTH_STEP = 8  # blocks: contexts are padded to a multiple of it, so that sizes come again


@dataclass(frozen=True)
class BlockIndex:
    """T tokens of S sequences, at most Q of each, that see up to K keys each."""

    slots: torch.Tensor  # [T] where each token's key goes among those of the cache; padding goes to the spare block
    keys: torch.Tensor  # [S, K] where the keys of each sequence lie
    grid: torch.Tensor  # [T] each token's place in [S, Q], flattened; S Q of padding
    positions: torch.Tensor  # [S, Q]
    masks: dict[int, torch.Tensor] = field(default_factory=dict)  # [S, 1, Q, K] by window

    @classmethod
    def of(
        cls, tables: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, spare: int, longest: int, context: int
    ) -> BlockIndex:
        """Makes it from `paged_attention`'s arguments: `longest` is the number of tokens of the longest sequence here,
        `context` the largest position + 1, `spare` a block that belongs to nobody."""
        width = min(tables.shape[1], -(-context // (BLOCK_SIZE * WIDTH_STEP)) * WIDTH_STEP)
        real, row, tables = rows >= 0, rows.clamp(min=0).long(), tables.long()
        block = tables[row].gather(1, (positions // BLOCK_SIZE)[:, None]).squeeze(1)
        slots = (block * BLOCK_SIZE + positions % BLOCK_SIZE).where(real, spare * BLOCK_SIZE)
        if longest == 1:  # decoding: each token is a sequence
            tables, grid = tables[row], torch.arange(len(row), device=row.device)
        else:
            start = torch.full_like(tables[:, 0], context).scatter_reduce(
                0, row, positions.where(real, context), "amin"
            )
            grid = (row * longest + positions - start[row]).where(real, len(tables) * longest)
        at = torch.arange(BLOCK_SIZE, device=row.device)
        keys = (tables[:, :width, None] * BLOCK_SIZE + at).flatten(1)
        places = positions.new_zeros(len(tables) * longest + 1).index_copy(0, grid, positions)
        return cls(slots, keys, grid, places[:-1].view(-1, longest))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scores: Scores,
    ) -> torch.Tensor:
        """[T, H, D], [T, KV, D], [T, KV, V] -> [T, H, V]; key and value go into one layer of the cache, both
        [KV, blocks, 16, .]. Arguments as of `paged_attention`; what comes out on padding means nothing."""
        kept = keys.flatten(1, 2), values.flatten(1, 2)
        for cache, new in zip(kept, (key, value), strict=True):
            cache.index_copy_(1, self.slots, new.transpose(0, 1).to(cache.dtype))
        (sequences, longest), (_, heads, dim), kv_heads = self.positions.shape, query.shape, key.shape[1]
        asked = query.new_zeros(sequences * longest + 1, heads, dim).index_copy(0, self.grid, query)
        asked = asked[:-1].view(sequences, longest, heads, dim).transpose(1, 2)  # [S, H, Q, D]
        mask, size = self._mask(scores.window), max(1, GATHERED // (self.keys.shape[1] * kv_heads * dim))
        outs = []
        for q, seen, at in zip(asked.split(size), mask.split(size), self.keys.split(size), strict=True):
            k, v = (c.index_select(1, at.flatten()).unflatten(1, at.shape).transpose(0, 1) for c in kept)
            outs.append(_attend(q, k, v, seen, scores))  # k, v [s, KV, K, D]
        out = torch.cat(outs).transpose(1, 2).flatten(0, 1)
        return F.pad(out, (0, 0, 0, 0, 0, 1)).index_select(0, self.grid)

    def _mask(self, window: int) -> torch.Tensor:
        """True where a token sees a key."""
        if window not in self.masks:
            at, positions = torch.arange(self.keys.shape[1], device=self.keys.device), self.positions[:, None, :, None]
            seen = at <= positions
            self.masks[window] = seen & (at > positions - window) if window else seen
        return self.masks[window]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, form: Scores) -> torch.Tensor:
    """[s, H, Q, D], [s, KV, K, D], [s, KV, K, V], [s, 1, Q, K] -> [s, H, Q, V]. Kernels that take a mask know no
    groups of heads: those of one key go together as queries, or, where there are several queries, keys are repeated."""
    sequences, heads, longest, dim = q.shape
    group = heads // k.shape[1]
    if longest == 1:
        q = q.reshape(sequences, -1, group, dim)
        seen = seen.expand(-1, -1, group, -1)
    elif group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    if form.cap or form.sinks is not None:  # the fused kernel knows neither
        scores = (q @ k.mT).float() * form.scale
        scores = (form.cap * (scores / form.cap).tanh() if form.cap else scores).masked_fill(~seen, float("-inf"))
        sinks = None if form.sinks is None else form.sinks.view(-1, group if longest == 1 else 1, 1)
        out = softmax(scores, sinks).to(v.dtype) @ v
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=form.scale)
    return out.reshape(sequences, heads, longest, -1)
