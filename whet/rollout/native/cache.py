# SPDX-License-Identifier: Apache-2.0
"""The block KV cache: memory for keys and values in blocks of 16 tokens, with a count of owners."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from whet.devices import moved
from whet.errors import EngineError
from whet.kernels.attention import Scores
from whet.kernels.paged_attention import BLOCK_SIZE, BlockIndex, paged_attention
from whet.models.caches import Pages, layer_caches, token_bytes
from whet.models.linear_attention import TokenFlow
from whet.rollout.native.states import DecodeFlow, States
from whet.rollout.protocol import Identity

Prefix = tuple[int, Identity]


def blocks_for(tokens: int) -> int:
    """The number of blocks that `tokens` tokens need."""
    return -(-tokens // BLOCK_SIZE)


class BlockCache:
    """Keys [layers, blocks, KV, D, 16] and values [layers, blocks, KV, 16, V] within a budget in bytes. With `by_head`,
    on an accelerator, both are [layers, KV, blocks, 16, .], with a spare block at the end for padding. Latents are
    stored as keys; the first numbers of each are its values. `states` has the states of layers, outside the budget.

    A block may belong to several sequences (a prompt's to all its samples) and is free when the last one releases it.
    """

    def __init__(
        self,
        config: Any,
        *,
        dtype: torch.dtype,
        budget_bytes: int,
        device: torch.device,
        by_head: bool = False,
        slots: int = 0,
    ) -> None:
        every = layer_caches(config)
        paged = {layer: each for layer, each in enumerate(every) if isinstance(each, Pages)}
        [pages] = {*paged.values()}
        (kv_heads, key_size, value_size), per_block = pages.stored, BLOCK_SIZE * token_bytes(config, dtype.itemsize)
        self.place = {layer: place for place, layer in enumerate(paged)}  # index of a layer in keys and values
        self.is_plain = len(paged) == len(every) and key_size == value_size  # as the kernels of accelerators need it
        self.states = States.of(config, slots, dtype, device)
        self.num_blocks = budget_bytes // per_block
        if self.num_blocks < 1:
            expected = f"at least {per_block}, for one block of {BLOCK_SIZE} tokens"
            raise EngineError("rollout.engine.options.kv_cache_bytes", budget_bytes, expected, "raise it")
        self.by_head, layers, self._block_dim = by_head, len(paged), 2 if by_head else 1
        if not by_head:
            # Empty, not zero: the operating system hands out pages when they are first written.
            self.keys = torch.empty(layers, self.num_blocks, kv_heads, key_size, BLOCK_SIZE, dtype=dtype)
            self.values = torch.empty(layers, self.num_blocks, kv_heads, BLOCK_SIZE, value_size, dtype=dtype)
        else:  # zeros: masked values are multiplied by 0, so they must not be NaN
            shape = (layers, kv_heads, self.num_blocks + 1, BLOCK_SIZE)
            self.keys, values = (torch.zeros(*shape, n, dtype=dtype, device=device) for n in (key_size, value_size))
            self.values = values if pages.latent is None else self.keys[..., : pages.latent[0]]
        self._free = list(range(self.num_blocks - 1, -1, -1))
        self._owners = [0] * self.num_blocks

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    @property
    def nbytes(self) -> int:
        """The bytes that the cache takes."""
        kept = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in (self.keys, self.values)}
        return sum(kept.values()) + (0 if self.states is None else self.states.nbytes)

    def free(self) -> None:
        """Frees the memory; the cache cannot be used afterwards."""
        self.keys, self.values, self.states = self.keys.new_empty(0), self.values.new_empty(0), None
        with suppress(AttributeError):  # glibc may hold it for its own heap
            ctypes.CDLL(None).malloc_trim(0)

    def take(self, count: int) -> list[int]:
        """Takes the free blocks with the lowest numbers. Each gets one owner."""
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._owners[block] = 1
        return taken

    def add_owner(self, blocks: Sequence[int]) -> None:
        """Adds an owner to each block."""
        for block in blocks:
            self._owners[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Removes an owner from each block."""
        for block in reversed(blocks):
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies the contents of blocks, in all layers."""
        if sources:
            both = moved(torch.tensor([list(sources), list(targets)]), self.keys.device)
            for tensor in (self.keys, self.values) if self.values._base is not self.keys else (self.keys,):
                tensor.index_copy_(self._block_dim, both[1], tensor.index_select(self._block_dim, both[0]))


class Prefixes:
    """Blocks of sequences that later requests may continue. The key of a block is all tokens up to its end. `Prefixes`
    is an owner of the blocks, and releases the least recently used first."""

    def __init__(self, cache: BlockCache) -> None:
        self.cache = cache
        self._blocks = OrderedDict[Prefix, int]()  # the next to be released first

    def keep(self, identity: Identity, blocks: Sequence[int]) -> None:
        """Keeps the blocks of a sequence. All tokens of `identity` are computed, or will be before a request shares
        them. Nobody may write into a last block that is not full. For layers with a state nothing is kept, because a
        state exists only at the end of a sequence."""
        if self.cache.states is not None:
            return
        new = zip(_prefixes(identity), blocks, strict=False)
        for prefix, block in reversed([*new]):  # the end of a sequence is released before its beginning
            if prefix not in self._blocks:
                self.cache.add_owner([block])
                self._blocks[prefix] = block
            self._blocks.move_to_end(prefix)

    def kept_part(self, identity: Identity) -> tuple[list[int], int]:
        """Returns the blocks of the longest kept prefix of a prompt, with one more owner, and the number of its tokens.
        The prompt's last token is never included, because the logits after it are needed. A block that is not full goes
        to the caller, who fills it, and is no longer kept here."""
        found, last, num_tokens = list[int](), list[int](), 0
        for before, tokens in _prefixes(identity[:-1]) if self._blocks else ():
            kept = next((count for count in range(len(tokens), 0, -1) if (before, tokens[:count]) in self._blocks), 0)
            num_tokens += kept
            if kept < BLOCK_SIZE:
                last = [self._blocks.pop((before, tokens[:kept]))] if kept else []
                break
            found.append(self._blocks[before, tokens])
        self.cache.add_owner(found)
        return found + last, num_tokens

    def free(self, count: int) -> None:
        """Releases blocks until `count` are free in the cache, or none is left."""
        while self._blocks and self.cache.num_free < count:
            self.cache.release([self._blocks.popitem(last=False)[1]])

    def clear(self) -> None:
        """Releases all blocks."""
        self.cache.release([*self._blocks.values()])
        self._blocks.clear()


def _prefixes(identity: Identity) -> Iterator[Prefix]:
    """Yields the name of each block of a sequence: a hash of the tokens before it, and its own tokens."""
    before = 0
    for start in range(0, len(identity), BLOCK_SIZE):
        prefix = before, identity[start : start + BLOCK_SIZE]
        yield prefix
        before = hash(prefix)


class PagedBatch:
    """A flat batch of T tokens, with the blocks of their sequences. It is the argument `paged` of the model's
    attention.

    `longest` (the most tokens that a sequence has among them) and `context` (the largest position + 1) are read from
    the accelerator if the caller does not pass them. Without a `flow` each token is the next token of the sequence
    whose slot is in `rows`."""

    compiles = False

    def __init__(
        self,
        cache: BlockCache,
        tables: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        longest: int | None = None,
        context: int | None = None,
        flow: TokenFlow | None = None,
    ) -> None:
        self.keys, self.values, self._place = cache.keys, cache.values, cache.place
        self.flow = DecodeFlow.of(cache.states, rows) if flow is None and cache.states is not None else flow
        self.tables, self.rows, self.positions = tables, rows, positions
        self._index: BlockIndex | None = None
        if cache.by_head:
            if longest is None or context is None:
                counts = torch.zeros_like(tables[:, 0]).scatter_add(0, rows.clamp(min=0).long(), (rows >= 0).int())
                longest, context = torch.stack([counts.max(), positions.max() + 1]).tolist()
            self._index = BlockIndex.of(tables, rows, positions, cache.num_blocks, longest, context)

    def layer(self, number: int) -> PagedBatch:
        """Returns the batch itself. Its attention reads the layer's number from the module."""
        return self

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """Caches key and value, and attends.   [T, H, D], [T, KV, D], [T, KV, V] -> [T, H, V]"""
        place = self._place[module.layer_idx]
        new, stored = (query, key, value), (self.keys[place], self.values[place])
        if self._index is not None:
            return self._index.attend(*new, *stored, scores)
        where = self.tables, self.rows, self.positions
        return paged_attention(*new, *stored, *where, scores.scale, scores.window, scores.cap, scores.sinks)
