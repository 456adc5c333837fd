# SPDX-License-Identifier: Apache-2.0
"""States of layers with linear attention: one in each running request's slot, one per prompt until its requests start.

A prompt is computed in chunks (on a CPU, each prompt alone), sampled tokens step by step. A request that resumes is
computed in the same way, so that its results equal the results of sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F

from whet.devices import HOST, moved
from whet.kernels.delta_rule import Rule, back, delta_rule, in_grid, weighted, with_zero
from whet.models.caches import State, layer_caches

End = dict[
    int, tuple[torch.Tensor, torch.Tensor]
]  # by layer: window [C, K - 1] and matrices [VH, K, V] after a sequence


def held(slots: int) -> int:
    """The number of sequences whose states are allocated for `slots` slots: one more, for padding."""
    return slots + 1


class States:
    """Windows [slots + 1, C, K - 1] of the convolution and matrices [slots + 1, VH, K, V], by layer; slot -1 pads."""

    def __init__(self, kinds: dict[int, State], slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spare = slots
        self.windows, self.matrices = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for layer, kind in kinds.items():
            shape = held(slots), kind.heads, kind.key_size, kind.value_size
            self.windows[layer] = torch.zeros(held(slots), kind.channels, kind.tokens, dtype=dtype, device=device)
            self.matrices[layer] = torch.zeros(shape, device=device)

    @classmethod
    def of(cls, config: Any, slots: int, dtype: torch.dtype, device: torch.device) -> States | None:
        """Makes the states for a model with this text config; None if no layer has one."""
        kinds = {layer: each for layer, each in enumerate(layer_caches(config)) if isinstance(each, State)}
        return cls(kinds, slots, dtype, device) if kinds else None

    @property
    def nbytes(self) -> int:
        """The bytes that the states take."""
        return sum(each.nbytes for each in [*self.windows.values(), *self.matrices.values()])

    def enter(self, slots: torch.Tensor, ends: Sequence[End]) -> None:
        """Copies the states at the ends of sequences into the slots of requests that start or resume."""
        for layer in self.windows if ends else ():
            there = moved(slots, self.windows[layer].device)
            for number, kept in enumerate((self.windows[layer], self.matrices[layer])):
                kept.index_copy_(0, there, torch.stack([end[layer][number] for end in ends]).to(kept.dtype))


@dataclass(frozen=True)
class DecodeFlow:
    """The TokenFlow of a decode step: one token in each of T sequences, whose states are in `slots`."""

    states: States
    slots: torch.Tensor  # [T]

    @classmethod
    def of(cls, states: States, rows: torch.Tensor) -> DecodeFlow:
        """Makes the flow for the slots in `rows` [T]; -1 is padding."""
        return cls(states, torch.where(rows < 0, states.spare, rows).long())

    def convolve(self, layer: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Convolves each token with its window, and shifts the windows.   [T, C] -> [T, C]"""
        kept = self.states.windows[layer]
        window, new = kept.index_select(0, self.slots), x[..., None]
        kept.index_copy_(0, self.slots, torch.cat([window[..., 1:], new.to(kept.dtype)], -1))
        return weighted([x, *window.unbind(-1)[::-1]], weight)

    def scan(self, layer: int, rule: Rule, steps: Rule, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Applies one step of the recurrence to the matrices.   [T, ...] -> [T, VH, V]"""
        kept = self.states.matrices[layer]
        out, end = delta_rule(steps, tuple(each[:, None] for each in inputs), kept.index_select(0, self.slots))
        kept.index_copy_(0, self.slots, end)
        return out[:, 0]


@dataclass(frozen=True)
class PrefillFlow:
    """The TokenFlow of a prefill: stretches of tokens, one after another. `starts` has the states before each."""

    lengths: Sequence[int]
    starts: Sequence[End | None]
    device: torch.device
    ends: list[End] = field(default_factory=list)  # after each

    def __post_init__(self) -> None:
        self.ends.extend({} for _ in self.lengths)

    def convolve(self, layer: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Convolves each token with the tokens before it, and puts the last windows in `ends`.   [T, C] -> [T, C]"""
        none, most = x.new_zeros(x.shape[1], weight.shape[1] - 1), weight.shape[1] - 1
        past = [(none if start is None else start[layer][0].to(x.dtype)).T for start in self.starts]
        firsts = self._firsts
        before = torch.arange(len(x) + most * len(past)) - 1
        before[firsts] = len(x) + most * torch.arange(1, len(past) + 1) - 1
        whole, before = torch.cat([x, *past]), before.to(x.device)
        newest = (firsts + torch.tensor(self.lengths) - 1).to(x.device)
        windows = torch.stack([*islice(back(whole, before, newest), most)][::-1], -1)
        for end, window in zip(self.ends, windows, strict=True):
            end[layer] = window, window
        return weighted(back(whole, before, torch.arange(len(x), device=x.device)), weight)

    def scan(self, layer: int, rule: Rule, steps: Rule, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Computes the recurrence for each of `_grids`; puts the last matrices in `ends`.   [T, ...] -> [T, VH, V]"""
        flat, out = with_zero(inputs), torch.zeros_like(inputs[2])
        out = F.pad(out, (0, 0, 0, 0, 0, 1))
        for index, numbers in self._grids(len(inputs[0])):
            starts = [start[layer][1] for number in numbers if (start := self.starts[number]) is not None]
            form = steps if starts and self.device == HOST else rule
            found, after = delta_rule(form, in_grid(flat, index), torch.stack(starts) if starts else None)
            out.index_copy_(0, index.flatten(), found.flatten(0, 1))
            for number, matrix in zip(numbers, after, strict=True):
                self.ends[number][layer] = self.ends[number][layer][0], matrix
        return out[:-1]

    @cached_property
    def _firsts(self) -> torch.Tensor:
        lengths = torch.tensor(self.lengths)
        return lengths.cumsum(0) - lengths

    def _grids(self, size: int) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """Yields grids [n, w] of places in the packed tokens, padded with `size`, and each row's index in `lengths`."""
        begin, go_on = ([n for n, each in enumerate(self.starts) if (each is None) == new] for new in (True, False))
        for numbers in [*([each] for each in begin), go_on] if self.device == HOST else [begin, go_on]:
            if numbers:
                at, lengths = torch.arange(max(self.lengths[n] for n in numbers)), torch.tensor(self.lengths)[numbers]
                index = torch.where(at < lengths[:, None], self._firsts[numbers][:, None] + at, size)
                yield index.to(self.device), numbers
