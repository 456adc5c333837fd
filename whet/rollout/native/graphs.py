# SPDX-License-Identifier: Apache-2.0
"""Decode steps that are recorded once for each kind, and then replayed by one call of the driver."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")


class Graphs:
    """CUDA graphs by kind of step, such as its batch size, which share their memory: a result holds until the next run.

    A graph reads and writes the addresses that it was recorded with. Whoever moves weights, cache or columns calls
    `forget`."""

    def __init__(self, device: torch.device) -> None:
        self._records = device.type == "cuda"
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: object = None

    def run(self, kind: Hashable, step: Callable[[], T]) -> T:
        """Runs `step`, or replays what it did when it was recorded as this kind."""
        if not self._records:
            return step()
        if kind not in self._graphs:
            result = step()  # compiles what is not compiled yet, which cannot be recorded
            self._record(kind, step)
            return result
        graph, found = self._graphs[kind]
        graph.replay()
        return cast(T, found)

    def _record(self, kind: Hashable, step: Callable[[], object]) -> None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy and allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # type: ignore[arg-type]
            result = step()
        self._graphs[kind] = graph, result

    def forget(self) -> None:
        """Drops all graphs, and frees their memory."""
        self._graphs.clear()
        self._pool = None
