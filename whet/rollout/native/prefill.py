# SPDX-License-Identifier: Apache-2.0
"""Prompts on an accelerator with Triton: batches of few sizes, so that the pass over one is recorded and replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from whet.devices import moved
from whet.models.caches import key_value_heads
from whet.models.packing import tile_tokens, tiles_of
from whet.rollout.native import scheduler
from whet.rollout.native.cache import BlockCache
from whet.rollout.native.columns import DeviceBatch, DeviceColumns, Forward, has_kernels, rectangular
from whet.rollout.native.paged_attention import BLOCK_SIZE
from whet.rollout.native.scheduler import Stretch, by_tokens

SIZES = 256, 512, 768, 1024, 1536, 2048, 3072, 4096  # tokens of a batch that is recorded
SHARE = 16  # it has room for so many times fewer stretches


class Prefill:
    """Computes batches of stretches from columns that stay where they are; `graphs` hold the decode steps too."""

    def __init__(self, columns: DeviceColumns, tile: int) -> None:
        self.graphs, self.device, self.tile = columns.graphs, columns.device, tile
        self._numbers = torch.zeros(sum(self._parts(SIZES[-1])), dtype=torch.int64, device=self.device)
        self._tables = torch.zeros_like(columns.tables[:1]).repeat(SIZES[-1] // SHARE, 1)

    @classmethod
    def of(cls, columns: DeviceColumns, config: Any) -> Prefill | None:
        """Makes it for a model with this text config; None without kernels."""
        tile = tile_tokens(config.num_attention_heads, key_value_heads(config))
        return cls(columns, tile) if has_kernels(columns.device) else None

    def _parts(self, size: int) -> list[int]:
        """Numbers of a batch of a size: ids, positions, slots, last tokens, and the most tiles that it may have."""
        return [size, size, size, size // SHARE, 4 * (-(-size // self.tile) + size // SHARE)]

    def logits(
        self, forward: Forward, cache: BlockCache, stretches: Sequence[Stretch], seen: Mapping[str, Any]
    ) -> torch.Tensor:
        """Fills the blocks of at most SIZES[-1] tokens.  Returns the logits after each stretch [S, V]."""
        count, tables = len(stretches), rectangular([each.blocks for each in stretches])
        lengths = torch.tensor([len(each.token_ids) for each in stretches])
        starts, rows = torch.tensor([each.start for each in stretches]), torch.arange(count)
        ids = torch.tensor([token for each in stretches for token in each.token_ids])
        row, ends = rows.repeat_interleave(lengths), lengths.cumsum(0)
        positions = torch.arange(len(ids)) - (ends - lengths - starts)[row]
        slots = tables[row, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        size = next(each for each in SIZES if each >= max(len(ids), count * SHARE))
        padding, parts = (0, size - len(ids)), self._parts(size)
        tiles = tiles_of(lengths, rows, starts, self.tile, parts[-1] // 4)
        spare = cache.num_blocks * BLOCK_SIZE  # a block that belongs to nobody
        tokens = F.pad(ids, padding), F.pad(positions, padding), F.pad(slots, padding, value=spare)
        if tables.shape[1] > self._tables.shape[1]:
            self._tables = F.pad(self._tables, (0, tables.shape[1] - self._tables.shape[1]))
            self.graphs.forget()
        numbers = torch.cat([*tokens, F.pad(ends - 1, (0, size // SHARE - count)), tiles.flatten()])
        self._numbers[: sum(parts)] = moved(numbers, self.device)
        self._tables[:count, : tables.shape[1]] = moved(tables, self.device)
        axes = None
        if any(each.prompt.rotary is not None for each in stretches):
            axes = moved(F.pad(torch.cat([each.rotary for each in stretches], 1), padding), self.device)

        def step() -> torch.Tensor:
            ids, rotary, slots, last, tiles = self._numbers[: sum(parts)].split(parts)
            paged = DeviceBatch(cache.keys, cache.values, self._tables, slots, tiles.view(-1, 4), in_tiles=True)
            return forward(ids, rotary if axes is None else axes, paged, last, seen)

        found = self.graphs.run(("prefill", size), step) if axes is None and not seen else step()
        return found[:count].clone()  # what was recorded writes its result there again


def in_parts(stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """Batches of stretches that a size has room for, of which longer ones are cut."""
    step = scheduler.PREFILL_TOKENS
    parts = [
        Stretch(ids[at : at + step], each.start + at, each.blocks, each.prompt, at + step >= len(ids))
        for each in stretches
        for ids in [each.token_ids]
        for at in range(0, len(ids), step)
    ]
    return by_tokens(parts, step // SHARE)
