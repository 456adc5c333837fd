# SPDX-License-Identifier: Apache-2.0
"""The two operations of linear attention that mix tokens, over packed rows: a short causal convolution, and the gated
delta rule (https://arxiv.org/abs/2412.06464)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial, reduce
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F

from whet.devices import runs_triton

CHUNK = 64  # tokens that the rule computes together
Rule = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def weighted(inputs: Iterable[torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    """Sums weight [C, K] times K inputs [N, C], the newest input first.   -> [N, C]"""
    products = (each * tap for each, tap in zip(inputs, weight.unbind(1)[::-1], strict=False))
    return reduce(torch.add, products)


def back(x: torch.Tensor, before: torch.Tensor, at: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields rows `at` of x [N, C], then their predecessors, and so on. `before` [N]: the predecessor of each row."""
    while True:
        yield x.index_select(0, at)
        at = before[at]


def delta_rule(rule: Rule, inputs: tuple[torch.Tensor, ...], start: torch.Tensor | None) -> tuple[Any, Any]:
    """Applies `rule` to n sequences of w tokens: query, key, value, log decay and rate [n, w, ...], from initial states
    [n, VH, K, V].  Returns [n, w, VH, V] and the final states. Zeros after a sequence do not change its state."""
    query, key, value, decay, rate = inputs
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return rule(query, key, value, g=decay, beta=rate, initial_state=start, **options)


def with_zero(inputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Appends a row of zeros, for padding, to each tensor [T, ...]."""
    return [F.pad(each, [*[0] * (2 * each.dim() - 1), 1]) for each in inputs]


def in_grid(flat: Sequence[torch.Tensor], index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gathers the rows `index` [n, w] of each tensor: [T + 1, ...] -> [n, w, ...]."""
    return tuple(each.index_select(0, index.flatten()).unflatten(0, index.shape) for each in flat)


@dataclass(frozen=True)
class PackedFlow:
    """The order in which packed rows are scanned. A piece is a run of consecutive tokens; pieces that begin with a zero
    state (shared prompts too) come first, then pieces that continue them."""

    before: torch.Tensor  # [S + 1] the predecessor of each token, S if it has none
    grids: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]  # [n, w] tokens, S: padding; [n] pieces to continue
    places: torch.Tensor  # [S] each token's index in the flattened grids; padding has the index after the last

    @classmethod
    def of(cls, before: torch.Tensor, size: int) -> PackedFlow:
        """Builds the flow from `before` [T], the predecessor of each token or -1. `size` is S, the padded T."""
        device, before = before.device, before.cpu()
        begins = before != torch.arange(len(before)) - 1
        begins[:1] = True
        begins[before[begins & (before >= 0)] + 1] = True  # after a prompt that another row continues
        firsts = begins.nonzero()[:, 0]
        lengths = firsts.diff(append=firsts.new_tensor([len(before)]))
        source = torch.where(before[firsts] < 0, -1, (begins.cumsum(0) - 1)[before[firsts]])
        order = [piece for _, pieces in _alike(lengths, source < 0) for piece in pieces]
        number = torch.empty_like(firsts)
        number[order] = torch.arange(len(order))
        grids, places, total = [], torch.full((size + 1,), -1), 0
        for is_late in (False, True):
            for width, pieces in _alike(lengths, (source >= 0) == is_late):
                at = torch.arange(width)
                index = torch.where(at < lengths[pieces, None], firsts[pieces, None] + at, size)
                places[index.flatten()] = total + torch.arange(index.numel())
                total += index.numel()
                grids.append((index.to(device), number[source[pieces]].to(device) if is_late else None))
        places = torch.where(places < 0, total, places)[:size]
        chain = F.pad(torch.where(before < 0, size, before), (0, size + 1 - len(before)), value=size)
        return cls(chain.to(device), tuple(grids), places.to(device))

    def convolve(self, layer: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Computes the causal convolution at each token, over the token and its predecessors.   [S, C] -> [S, C]"""
        at = torch.arange(len(x), device=x.device)
        return weighted(back(F.pad(x, (0, 0, 0, 1)), self.before, at), weight)

    def scan(self, layer: int, rule: Rule, steps: Rule, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Applies the delta rule to all pieces, grid by grid or in one kernel call.   [S, ...] -> [S, VH, V]"""
        if (packed := packed_rule(inputs[0].device)) is not None and inputs[0].dtype != torch.float32:
            return self._in_calls(packed, inputs)
        flat = with_zero(inputs)
        outs, ends, known = list[torch.Tensor](), list[torch.Tensor](), None
        for index, source in self.grids:
            known = torch.cat(ends) if source is not None and known is None else known
            start = None if source is None or known is None else known.index_select(0, source)
            out, end = delta_rule(rule, in_grid(flat, index), start)
            outs.append(out.flatten(0, 1))
            ends.append(end)
        return torch.cat([*outs, flat[2][-1:]]).index_select(0, self.places)  # padding gets 0

    @cached_property
    def calls(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Returns one entry for the pieces that begin with a zero state, and one for the other pieces. An entry has the
        tokens of all its pieces, the start of each piece, and the number of the piece that each piece continues."""
        found, size = [], len(self.places)
        for is_late in (False, True):
            if grids := [grid for grid in self.grids if (grid[1] is not None) == is_late]:
                tokens = torch.cat([index[index < size] for index, _ in grids])
                lengths = torch.cat([(index < size).sum(1) for index, _ in grids])
                source = torch.cat([number for _, number in grids if number is not None]) if is_late else None
                found.append((tokens, F.pad(lengths.cumsum(0), (1, 0)), source))
        return found

    def _in_calls(self, packed: Rule, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        out, ends = torch.zeros_like(inputs[2]), inputs[2].new_zeros(0)
        for tokens, begins, source in self.calls:
            start = None if source is None else ends.index_select(0, source)
            one = tuple(each.index_select(0, tokens)[None] for each in inputs)
            found, ends = delta_rule(partial(packed, cu_seqlens=begins), one, start)
            out = out.index_copy(0, tokens, found[0].to(out.dtype))
        return out


@cache
def packed_rule(device: torch.device) -> Rule | None:
    """Returns flash-linear-attention's rule for packed sequences, if it is installed and the device runs Triton.
    The call follows the package's documentation; it has not yet run on an accelerator."""
    if not runs_triton(device, "linear attention is torch's") or find_spec("fla") is None:
        return None
    found: Rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    return found


def _alike(lengths: torch.Tensor, chosen: torch.Tensor) -> Iterator[tuple[int, list[int]]]:
    """Groups the pieces that are `chosen` by their number of chunks, rounded up to a power of two. Yields, for each
    group, the length of its longest piece and the numbers of its pieces."""
    chunks = ((lengths + CHUNK - 1) // CHUNK).tolist()
    groups: dict[int, list[int]] = {}
    for piece in chosen.nonzero()[:, 0].tolist():
        groups.setdefault((chunks[piece] - 1).bit_length(), []).append(piece)
    for pieces in groups.values():
        yield int(lengths[pieces].max()), pieces
