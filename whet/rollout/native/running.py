# SPDX-License-Identifier: Apache-2.0
"""The requests being decoded, as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from whet.rollout.native.paged_attention import BLOCK_SIZE
from whet.rollout.native.scheduler import Answer
from whet.rollout.protocol import Completion
from whet.rollout.sampling import SamplingState, is_stop, sample
from whet.rollout.stop_strings import StopStrings
from whet.types import FinishReason

COLUMNS = ("index", "tokens", "positions", "counts", "slots")


class Running:
    """n rows, one a request, in no order that matters."""

    def __init__(
        self,
        sampling: SamplingState,
        stops: Sequence[StopStrings | None],
        capacity: int,
        table_width: int,
        longest: int,
    ) -> None:
        device = sampling.keys.device
        self.sampling, self.stops = sampling, stops  # of all requests
        self.index = torch.empty(0, dtype=torch.int64, device=device)  # [n] which request
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)  # [n] sampled last, to be fed next
        self.positions = torch.empty(0, dtype=torch.int64, device=device)  # [n] where that token stands
        self.counts = torch.empty(0, dtype=torch.int64, device=device)  # [n] tokens sampled so far
        self.slots = torch.empty(0, dtype=torch.int64, device=device)  # [n] row of `tables` and of the outputs
        self.tables = torch.zeros(capacity, table_width, dtype=torch.int32, device=device)
        self.out_tokens = torch.zeros(capacity, longest, dtype=torch.int64, device=device)
        self.out_log_probs = torch.empty(capacity, longest, dtype=torch.float32, device=device)
        self.own = sampling.rows(self.index)  # of the n requests
        self._has_stops = any(each is not None for each in stops)
        self._free_slots = list(range(capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.index)

    def add(self, answers: Sequence[Answer]) -> None:
        """Rows for answers that go on; for those that start too, whose first token comes with `sample`."""
        device = self.index.device
        slots = [self._free_slots.pop() for _ in answers]
        width = max(len(each.blocks) for each in answers)
        tables = [each.blocks + [0] * (width - len(each.blocks)) for each in answers]
        self.tables[slots, :width] = torch.tensor(tables, dtype=torch.int32, device=device)
        new = {
            "index": [each.index for each in answers],
            "tokens": [each.tokens[-1] if each.tokens else 0 for each in answers],
            "positions": [len(each.prompt.token_ids) + len(each.tokens) - 1 for each in answers],
            "counts": [len(each.tokens) for each in answers],
            "slots": slots,
        }
        for name, values in new.items():
            vars(self)[name] = torch.cat([vars(self)[name], torch.tensor(values, dtype=torch.int64, device=device)])
        for slot, each in zip(slots, answers, strict=True):
            if each.tokens:
                self.out_tokens[slot, : len(each.tokens)] = torch.tensor(each.tokens, device=device)
                self.out_log_probs[slot, : len(each.tokens)] = torch.tensor(each.log_probs, device=device)
        self.own = self.sampling.rows(self.index)

    def sample(self, logits: torch.Tensor, first: int = 0) -> None:
        """The next token of the rows from `first` on, from their logits."""
        rows = slice(first, None)
        own = self.own if first == 0 else self.sampling.rows(self.index[rows])
        slots, counts = self.slots[rows], self.counts[rows]
        generated = None
        if own.constraints is not None:
            generated = self.out_tokens[slots, : max(1, int(counts.max()))]
        tokens, log_probs = sample(logits, own, counts, generated)
        self.out_tokens[slots, counts] = tokens
        self.out_log_probs[slots, counts] = log_probs
        self.tokens[rows] = tokens
        self.positions[rows] += 1
        self.counts[rows] += 1

    def without_room(self) -> list[int]:
        """The requests whose next token begins a block."""
        return self.index[self.positions % BLOCK_SIZE == 0].tolist()

    def extend(self, blocks: Mapping[int, int]) -> None:
        """One block more for some requests, of which `without_room` spoke."""
        if not blocks:
            return
        rows = self._rows_of(blocks)
        order = torch.tensor([blocks[index] for index in self.index[rows].tolist()], dtype=torch.int32)
        self.tables[self.slots[rows], self.positions[rows] // BLOCK_SIZE] = order.to(rows.device)

    def remove(self, answers: Sequence[Answer]) -> None:
        """Takes out the rows of preempted answers, which remember what they had sampled."""
        if not answers:
            return
        by_index = {each.index: each for each in answers}
        rows = self._rows_of(by_index)
        for index, slot, count in zip(*self._lists(rows, "index", "slots", "counts"), strict=True):
            by_index[index].tokens = self.out_tokens[slot, :count].tolist()
            by_index[index].log_probs = self.out_log_probs[slot, :count].tolist()
        self._drop(rows)

    def finish(self, version: int) -> dict[int, Completion]:
        """Takes out the rows that are done: their completions, by request."""
        stopped = is_stop(self.tokens, self.own)
        found = self._found_stops() if self._has_stops else {}
        if found:
            stopped[list(found)] = True
        ended = stopped | (self.counts >= self.own.limits)
        if not bool(ended.any()):
            return {}
        rows = ended.nonzero().squeeze(1)
        longest = int(self.counts[rows].max())
        tokens, log_probs = (out[self.slots[rows], :longest].tolist() for out in (self.out_tokens, self.out_log_probs))
        columns = (rows.tolist(), *self._lists(rows, "index", "counts"), stopped[rows].tolist())
        done: dict[int, Completion] = {}
        for row, index, count, stop, ids, values in zip(*columns, tokens, log_probs, strict=True):
            reason: FinishReason = "stop" if stop else "length"
            done[index] = Completion(tuple(ids[:count]), tuple(values[:count]), reason, version, found.get(row))
        self._drop(rows)
        return done

    def _found_stops(self) -> dict[int, str]:
        """The stop string that the newest token of a row completes, by row; a stop token comes before one."""
        found: dict[int, str] = {}
        columns = self._lists(slice(None), "index", "tokens", "slots", "counts")
        ended = is_stop(self.tokens, self.own).tolist()
        for row, (index, token, slot, count) in enumerate(zip(*columns, strict=True)):
            stops = self.stops[index]
            if stops is None or ended[row]:
                continue
            string = stops.found(token, self.out_tokens[slot, :count])
            if string is not None:
                found[row] = string
        return found

    def _rows_of(self, indices: Mapping[int, object]) -> torch.Tensor:
        chosen = torch.tensor(list(indices), dtype=torch.int64, device=self.index.device)
        return torch.isin(self.index, chosen).nonzero().squeeze(1)

    def _lists(self, rows: torch.Tensor | slice, *names: str) -> list[list[int]]:
        return [vars(self)[name][rows].tolist() for name in names]

    def _drop(self, rows: torch.Tensor) -> None:
        self._free_slots += self.slots[rows].tolist()
        left = torch.ones(len(self), dtype=torch.bool, device=rows.device)
        left[rows] = False
        for name in COLUMNS:
            vars(self)[name] = vars(self)[name][left]
        self.own = self.sampling.rows(self.index)
