# SPDX-License-Identifier: Apache-2.0
"""A stand-in for an accelerator: the native engine's columns, cache and steps of a device on a CPU, with kernels in
torch and graphs that record and replay."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from whet.devices import HOST
from whet.kernels.paged_attention import reference
from whet.kernels.sampling import SamplingState, sample
from whet.rollout.native import columns, engine
from whet.rollout.native.cache import BLOCK_SIZE, BlockCache


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int,
    cap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Does the kernel's work in torch, with the cache layout of an accelerator."""
    by_block = keys.permute(1, 0, 3, 2).contiguous(), values.transpose(0, 1).contiguous()
    out = reference(query, key, value, *by_block, tables, slots.int(), positions, scale, window, cap, sinks)
    block = tables[slots, positions // BLOCK_SIZE].long()
    keys[:, block, positions % BLOCK_SIZE] = key.transpose(0, 1).to(keys.dtype)
    values[:, block, positions % BLOCK_SIZE] = value.transpose(0, 1).to(values.dtype)
    return out


def tile_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    window: int,
    cap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel's work in torch."""
    rows, positions = torch.full((len(query),), -1, dtype=torch.int32), torch.zeros(len(query), dtype=torch.int64)
    for first, count, row, position in tiles.tolist():
        rows[first : first + count] = row
        positions[first : first + count] = torch.arange(position, position + count)
    by_block = keys.permute(1, 0, 3, 2).contiguous(), values.transpose(0, 1).contiguous()
    out = reference(query, key, value, *by_block, tables, rows, positions, scale, window, cap, sinks)
    for kept, new in ((keys, key), (values, value)):
        kept.flatten(1, 2).index_copy_(1, slots, new.transpose(0, 1).to(kept.dtype))
    return out


def pick(
    logits: torch.Tensor,
    sampling: SamplingState,
    slots: torch.Tensor,
    counts: torch.Tensor,
    newest: torch.Tensor,
    results: torch.Tensor,
) -> None:
    """The kernel's work in torch."""
    tokens, log_probs = sample(logits, replace(sampling.rows(slots), plain=False), counts)
    newest[slots] = tokens
    results[0], results[1] = tokens, log_probs.float().view(torch.int32)


class Recorder(columns.Graphs):
    """Replays a step with the values captured at its recording: columns at other addresses go unseen."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._steps: dict[Hashable, Any] = {}
        self.recorded = 0

    def run(self, kind: Hashable, step: Any) -> Any:
        if kind not in self._steps:
            self._steps[kind], self.recorded = step, self.recorded + 1
        return self._steps[kind]()

    def forget(self) -> None:
        self._steps.clear()


def install(monkeypatch: pytest.MonkeyPatch, *, interpreted: bool = False) -> None:
    """From now on the native engine treats the host as an accelerator; with its own kernels, if these are
    `interpreted`."""
    if not interpreted:
        attends = {"decode_attention": decode_attention, "tile_attention": tile_attention}
        for name, functions in {"paged_attention_triton": attends, "sampling_triton": {"pick": pick}}.items():
            kernels = ModuleType(f"whet.kernels.{name}")
            vars(kernels).update(functions)
            monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
            monkeypatch.setattr(kernels.__name__, kernels, raising=False)
    for module in (columns, engine):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)
    monkeypatch.setattr(columns, "Graphs", Recorder)
    monkeypatch.setattr(engine, "is_stepwise", lambda device: device == HOST)
    monkeypatch.setattr(engine, "compile_layers", lambda module: None)
    monkeypatch.setattr(engine, "BlockCache", small_cache)


def small_cache(config: Any, *, budget_bytes: int, **given: Any) -> BlockCache:
    """A cache of 16 MiB at the most: a device's is zeroed when it is made."""
    return BlockCache(config, budget_bytes=min(budget_bytes, 2**24), **given)
