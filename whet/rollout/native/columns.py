# SPDX-License-Identifier: Apache-2.0
"""Per-slot values that a device reads, as columns: newest tokens, block tables, parameters.

This file has all differences between host and accelerator. `HostColumns` computes immediately. `DeviceColumns` starts a
step asynchronously, or replays a recorded step (`Graphs`), and reads its tokens later."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.nn.functional as F

from whet.devices import HOST, moved, runs_triton
from whet.kernels.attention import Scores
from whet.kernels.paged_attention import BLOCK_SIZE
from whet.kernels.sampling import SamplingState, sample
from whet.models.linear_attention import TokenFlow
from whet.rollout.native.cache import BlockCache, PagedBatch

MIN_ROWS = 16
# For gates, one number a token: torch computes exp of the numbers after a multiple of 32 by another function.
GATED_ROWS = 32
# Batches of a graph: small ones by 16 rows, larger ones by 64, so that few graphs serve a run and few rows are padding.
FINE_ROWS, FINE_STEP, COARSE_STEP = 64, 16, 64

T = TypeVar("T")
Forward = Callable[[torch.Tensor, torch.Tensor, Any, torch.Tensor | None, Mapping[str, Any]], torch.Tensor]


class SampledTokens(NamedTuple):
    """Tokens and their log-probs. They are on the host once the event `ready` has happened."""

    tokens: torch.Tensor  # [n]
    log_probs: torch.Tensor  # [n]
    ready: torch.Event | None = None

    def here(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Waits for the step.  Returns tokens [n] int64 and log-probs [n]."""
        if self.ready is not None:
            self.ready.synchronize()
        return self.tokens.long(), self.log_probs


class Columns(Protocol):
    """Values of each slot, in memory that the device reads."""

    late: int  # steps that may be in flight when the next begins

    def resize(self, rows: int, width: int) -> None:
        """Makes room for `rows` slots with `width` blocks each."""

    def enter(self, slots: torch.Tensor, newest: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """Sets the newest token and all blocks of new rows."""

    def extend(self, slots: torch.Tensor, places: torch.Tensor, blocks: torch.Tensor) -> None:
        """Adds one block to each of the `slots`, at `places` of their block tables."""

    def moved(self, sampling: SamplingState) -> SamplingState:
        """Copies the sampling parameters to the device."""

    def decode(self, forward: Forward, cache: BlockCache, rows: Rows) -> tuple[torch.Tensor, SampledTokens]:
        """Feeds the newest token of each row to `forward` and samples the next. Also returns the logits [n, V]."""

    def pick(self, logits: torch.Tensor, rows: Rows) -> SampledTokens:
        """Samples from logits [n, V] as `sampling.sample` does. Stores the tokens as the newest of their slots."""


class Rows(NamedTuple):
    """The rows that a step samples: n slots, with positions, counts and sampling parameters, on the host."""

    slots: torch.Tensor  # [n]
    positions: torch.Tensor  # [n] of the newest tokens
    shifts: torch.Tensor  # [n] from `positions` to the rotary positions
    counts: torch.Tensor  # [n] tokens of their responses so far
    sampling: SamplingState  # by slot
    generated: torch.Tensor | None  # [n, T] tokens of the responses, if constraints read them


class HostColumns:
    """Columns on the host. Every step runs immediately."""

    late = 0

    def __init__(self) -> None:
        self.newest = torch.zeros(0, dtype=torch.int64)
        self.tables = torch.zeros(0, 0, dtype=torch.int32)
        self._rows: tuple[SamplingState, torch.Tensor, SamplingState] | None = None  # by slot, slots, of slots

    def resize(self, rows: int, width: int) -> None:
        more, wider = max(0, rows - len(self.newest)), max(0, width - self.tables.shape[1])
        if more or wider:
            self.newest, self.tables = F.pad(self.newest, (0, more)), F.pad(self.tables, (0, wider, 0, more))

    def enter(self, slots: torch.Tensor, newest: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        self.newest[slots] = torch.tensor(newest)
        rectangle = rectangular(blocks)
        self.tables[slots, : rectangle.shape[1]] = rectangle

    def extend(self, slots: torch.Tensor, places: torch.Tensor, blocks: torch.Tensor) -> None:
        self.tables[slots, places] = blocks

    def moved(self, sampling: SamplingState) -> SamplingState:
        return sampling

    def decode(self, forward: Forward, cache: BlockCache, rows: Rows) -> tuple[torch.Tensor, SampledTokens]:
        ids, slots = self.newest[rows.slots], rows.slots.int()
        inputs = padded(cache, ids, rows.positions + rows.shifts, slots, rows.positions, self.tables)
        logits = forward(*inputs, None, {})[: len(slots)]
        return logits, self.pick(logits, rows)

    def pick(self, logits: torch.Tensor, rows: Rows) -> SampledTokens:
        sampling, slots = rows.sampling, rows.slots
        if self._rows is None or self._rows[0] is not sampling or self._rows[1] is not slots:
            self._rows = sampling, slots, sampling.rows(slots)
        tokens, log_probs = sample(logits, self._rows[2], rows.counts, rows.generated)
        self.newest[slots] = tokens
        return SampledTokens(tokens, log_probs)


@dataclass(frozen=True)
class DeviceBatch:
    """The KV cache and the places of a pass's tokens in it: of one token of each of B rows, or of T prompt tokens."""

    keys: torch.Tensor  # [layers, KV, blocks, 16, D], or of one layer
    values: torch.Tensor
    tables: torch.Tensor  # [S, W]
    slots: (
        torch.Tensor
    )  # [B] rows of the tables; of tiles [T] where the key of each token goes among those of the cache
    places: torch.Tensor  # [B] positions; of tiles [n, 4], as `packing.tiles_of` makes them
    in_tiles: bool

    compiles = True
    flow: TokenFlow | None = None

    def layer(self, number: int) -> DeviceBatch:
        """Returns the batch for one layer, so that one compiled layer serves all layers."""
        return replace(self, keys=self.keys[number], values=self.values[number])

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
    ) -> torch.Tensor:
        """Caches key and value, and attends.   [T, H, D], [T, KV, D], [T, KV, D] -> [T, H, D]"""
        where = self.layer(module.layer_idx) if self.keys.dim() == 5 else self
        from whet.kernels.paged_attention_triton import decode_attention, tile_attention

        run = tile_attention if self.in_tiles else decode_attention
        kept = (where.keys, where.values, where.tables, where.slots, where.places)
        return run(query.to(where.keys.dtype), key, value, *kept, *scores)


class Graphs:
    """CUDA graphs by kind of step, such as its batch size. They share memory: a result is valid until the next run.

    A graph reads and writes the addresses that it was recorded with. A caller that moves weights, cache or columns must
    call `forget`."""

    def __init__(self, device: torch.device) -> None:
        self._records = device.type == "cuda"
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: object = None

    def run(self, kind: Hashable, step: Callable[[], T]) -> T:
        """Runs `step`, or replays the graph recorded for this `kind`."""
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


class DeviceColumns:
    """Columns at fixed addresses of an accelerator, so that a recorded step can be replayed. One copy sends a step's
    inputs to the device. One copy brings its tokens and log-probs to the host, one step later."""

    late = 1

    def __init__(self, device: torch.device, max_rows: int, width: int, *, fixed: bool = False) -> None:
        self.device, self.max_rows, self.graphs, self.fixed = device, max_rows, Graphs(device), fixed
        # The last row belongs to nobody: padding reads and writes it.
        self.newest = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self.tables = torch.zeros(max_rows + 1, width, dtype=torch.int32, device=device)
        self._inputs = torch.zeros(5 * batch_size(max_rows), dtype=torch.int64, device=device)
        self._sampling = SamplingState.of([], 0, HOST).wider(max_rows + 1).to(device)
        self._blocks = torch.zeros(max_rows + 1, dtype=torch.int64)  # on the host: block of the next token, by slot
        self._addresses: tuple[int, ...] = ()

    def at(self, tensors: Sequence[torch.Tensor]) -> None:
        """Drops recorded steps if the addresses of weights or cache have changed, because a recorded step keeps
        addresses."""
        addresses = tuple(each.data_ptr() for each in tensors) if has_kernels(self.device) else ()
        if addresses != self._addresses:
            self.graphs.forget()
        self._addresses = addresses

    def resize(self, rows: int, width: int) -> None:
        if width > self.tables.shape[1]:
            self.tables = F.pad(self.tables, (0, width - self.tables.shape[1]))
            self.graphs.forget()

    def enter(self, slots: torch.Tensor, newest: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        rectangle = rectangular(blocks)
        numbers = torch.cat([slots[:, None], torch.tensor(newest)[:, None], rectangle], 1)
        there = moved(numbers, self.device)
        self.newest.index_copy_(0, there[:, 0], there[:, 1])
        self.tables[:, : rectangle.shape[1]].index_copy_(0, there[:, 0], there[:, 2:].int())
        self._blocks[slots] = torch.tensor([each[-1] for each in blocks])

    def extend(self, slots: torch.Tensor, places: torch.Tensor, blocks: torch.Tensor) -> None:
        self._blocks[slots] = blocks.long()  # the step itself enters it in the table

    def moved(self, sampling: SamplingState) -> SamplingState:
        there = sampling.to(self.device)
        for kept, new in zip(self._drawn(self._sampling), self._drawn(there), strict=True):
            kept[: len(new)] = new
        return there

    @staticmethod
    def _drawn(sampling: SamplingState) -> tuple[torch.Tensor, ...]:
        """The sampling parameters that a recorded step reads."""
        return sampling.keys, sampling.temperature, sampling.greedy

    def decode(self, forward: Forward, cache: BlockCache, rows: Rows) -> tuple[torch.Tensor, SampledTokens]:
        count, size = len(rows.slots), batch_size(len(rows.slots))
        self._blocks[-1] = cache.num_blocks  # the spare one
        slots = F.pad(rows.slots, (0, size - count), value=self.max_rows)
        positions, shifts, counts = (F.pad(each, (0, size - count)) for each in rows[1:4])
        inputs = self._inputs[: 5 * size].view(5, size)
        sent = torch.stack([slots, positions, positions + shifts, self._blocks[slots], counts])
        inputs.copy_(moved(sent, self.device), non_blocking=True)
        is_drawn = has_kernels(self.device) and rows.sampling.is_uncut

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            slots, positions, rotary, blocks, counts = inputs
            self.tables.index_put_((slots, positions // BLOCK_SIZE), blocks.int())
            kept = cache.keys, cache.values, self.tables
            if self.fixed:
                number = torch.arange(size, device=self.device)
                tiles = torch.stack([number, torch.ones_like(number), slots, positions], 1)
                paged: Any = DeviceBatch(*kept, blocks * BLOCK_SIZE + positions % BLOCK_SIZE, tiles, in_tiles=True)
            elif has_kernels(self.device) and cache.is_plain:
                paged = DeviceBatch(*kept, slots, positions, in_tiles=False)
            else:
                paged = PagedBatch(cache, self.tables, slots.int(), positions, longest=1, context=context)
            logits = forward(self.newest[slots], rotary, paged, None, {})
            results = torch.empty(2, size, dtype=torch.int32, device=self.device)
            if is_drawn:
                self._draw(logits, slots, counts, results)
            return logits, results

        context = int(positions.max()) + 1
        is_recorded = has_kernels(self.device) and cache.is_plain
        logits, results = self.graphs.run((size, is_drawn), step) if is_recorded else step()
        logits = logits[:count]
        return logits, self._coming(results[:, :count]) if is_drawn else self.pick(logits, rows)

    def pick(self, logits: torch.Tensor, rows: Rows) -> SampledTokens:
        slots, counts = moved(torch.stack([rows.slots, rows.counts]), self.device)
        results = torch.empty(2, len(slots), dtype=torch.int32, device=self.device)
        if has_kernels(self.device) and rows.sampling.is_uncut:
            self._draw(logits, slots, counts, results)
        else:
            seen = None if rows.generated is None else moved(rows.generated, self.device)
            tokens, log_probs = sample(logits, rows.sampling.rows(slots), counts, seen)
            self.newest.index_copy_(0, slots, tokens)
            results[0], results[1] = tokens, log_probs.float().view(torch.int32)
            self._fix(logits, slots, results)
        return self._coming(results)

    def _draw(self, logits: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor, results: torch.Tensor) -> None:
        """Draws tokens with the sampling kernel."""
        from whet.kernels.sampling_triton import pick

        pick(logits, self._sampling, slots, counts, self.newest, results)
        self._fix(logits, slots, results)

    def _fix(self, logits: torch.Tensor, slots: torch.Tensor, results: torch.Tensor) -> None:
        """Computes the log-probs again with the trainer's kernels, if `fixed` (option `batch_invariant`)."""
        if self.fixed:
            from whet.kernels.log_probs_triton import statistics

            found = statistics(logits, results[0], 1.0, 0.0, self._sampling.temperature[slots])
            results[1] = found[0].view(torch.int32)

    def _coming(self, results: torch.Tensor) -> SampledTokens:
        """Starts the copy of tokens and log-probs to the host.  Returns them."""
        here = results.to(HOST, non_blocking=True, copy=True)
        ready = torch.Event(self.device) if self.device != HOST else None
        if ready is not None:
            ready.record()
        return SampledTokens(here[0], here[1].view(torch.float32), ready)


def has_kernels(device: torch.device) -> bool:
    """Tells whether Triton compiles for the device. If not, logs this once."""
    return runs_triton(device, "decoding uses torch's attention, which is several times slower")


def batch_size(rows: int) -> int:
    """Rounds `rows` up to a batch size for which a step is recorded as a CUDA graph."""
    step = FINE_STEP if rows <= FINE_ROWS else COARSE_STEP
    return -(-max(rows, 1) // step) * step


def rectangular(blocks: Sequence[Sequence[int]]) -> torch.Tensor:
    """Pads the blocks of each row with zeros.   [n, W] int32"""
    width = max(map(len, blocks))
    return torch.tensor([[*each, *[0] * (width - len(each))] for each in blocks], dtype=torch.int32)


def padded(
    cache: BlockCache,
    ids: torch.Tensor,
    rotary: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    longest: int | None = None,
    context: int | None = None,
    flow: TokenFlow | None = None,
) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    """Pads the inputs of the engine's forward pass to one of a few sizes. With many rows at most an eighth is added.
    The last three arguments belong to `PagedBatch`."""
    least = MIN_ROWS if cache.states is None else GATED_ROWS
    step = max(least, 1 << max(0, (len(ids) - 1).bit_length() - 3))
    extra = -len(ids) % step
    ids, rotary, positions = (F.pad(each, (0, extra)) for each in (ids, rotary, positions))
    rows = F.pad(rows, (0, extra), value=-1)
    return ids, rotary, PagedBatch(cache, tables, rows, positions, longest, context, flow)
