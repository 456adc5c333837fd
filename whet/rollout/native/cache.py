# SPDX-License-Identifier: Apache-2.0
"""The block KV cache: memory for keys and values in blocks of 16 tokens, owned by counting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from whet.errors import EngineError
from whet.rollout.native.paged_attention import BLOCK_SIZE, paged_attention


def blocks_for(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_SIZE)


class BlockCache:
    """Keys [layers, blocks, KV, D, 16] and values [layers, blocks, KV, 16, D] within a budget in bytes.

    A block may belong to several sequences (a prompt's to all its samples) and is free when the last one lets go.
    """

    def __init__(self, config: Any, *, dtype: torch.dtype, budget_bytes: int, device: torch.device) -> None:
        kv_heads = config.num_key_value_heads
        head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
        per_block = config.num_hidden_layers * 2 * kv_heads * head_dim * BLOCK_SIZE * dtype.itemsize
        self.num_blocks = budget_bytes // per_block
        if self.num_blocks < 1:
            raise EngineError(
                f"rollout.engine.options.kv_cache_bytes={budget_bytes} holds no block of {BLOCK_SIZE} tokens "
                f"({per_block} bytes)"
            )
        # Empty, not zero: the operating system hands out pages when they are first written.
        shape = (config.num_hidden_layers, self.num_blocks, kv_heads)
        self.keys = torch.empty(*shape, head_dim, BLOCK_SIZE, dtype=dtype, device=device)
        self.values = torch.empty(*shape, BLOCK_SIZE, head_dim, dtype=dtype, device=device)
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._owners = [0] * self.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def free(self) -> None:
        """Gives the memory back; nothing may be stored after it."""
        self.keys, self.values = self.keys.new_empty(0), self.values.new_empty(0)

    def take(self, count: int) -> list[int]:
        """So many free blocks, lowest first, owned once."""
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._owners[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more owner for each block."""
        for block in blocks:
            self._owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each block."""
        for block in reversed(blocks):
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Block contents in all layers."""
        if sources:
            source, target = (torch.tensor(blocks, device=self.keys.device) for blocks in (sources, targets))
            for tensor in (self.keys, self.values):
                tensor.index_copy_(1, target, tensor.index_select(1, source))


class PagedBatch:
    """A flat batch of T tokens and where their sequences lie in the cache: what the model's attention is given."""

    def __init__(self, cache: BlockCache, tables: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
        self.keys, self.values = cache.keys, cache.values
        self.tables, self.rows, self.positions = tables, rows, positions

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int,
        cap: float,
    ) -> torch.Tensor:
        """[T, H, D], [T, KV, D], [T, KV, D] -> [T, H, D]; remembers key and value."""
        return paged_attention(
            query,
            key,
            value,
            self.keys[layer],
            self.values[layer],
            self.tables,
            self.rows,
            self.positions,
            scale,
            window,
            cap,
        )
