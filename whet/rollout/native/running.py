# SPDX-License-Identifier: Apache-2.0
"""The requests being decoded, as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from whet.rollout.in_process import Done
from whet.rollout.native.paged_attention import BLOCK_SIZE
from whet.rollout.native.scheduler import ScheduledRequest
from whet.rollout.sampling import SamplingState, is_stop, likeliest, sample
from whet.rollout.stop_strings import StopStrings
from whet.types import FinishReason


class Columns(NamedTuple):
    """Numbers of running requests   [n]"""

    tokens: torch.Tensor  # sampled last, to be fed next
    positions: torch.Tensor  # place of that token in its sequence
    shifts: torch.Tensor  # from that to its rotary position
    counts: torch.Tensor  # tokens of the response so far
    slots: torch.Tensor  # row of the block tables and of the outputs

    @classmethod
    def of(cls, live: Sequence[ScheduledRequest], slots: Sequence[int], device: torch.device) -> Columns:
        """The columns of requests that start or go on."""
        tokens = [each.tokens[-1] if each.tokens else 0 for each in live]
        positions = [len(each.prompt.token_ids) + len(each.tokens) - 1 for each in live]
        shifts = [each.prompt.shift for each in live]
        counts = [len(each.tokens) for each in live]
        columns = (torch.tensor(values, dtype=torch.int64) for values in (tokens, positions, shifts, counts, slots))
        return cls(*(column.to(device) for column in columns))

    def joined(self, other: Columns) -> Columns:
        """Returns these rows, then the others."""
        return Columns(*map(torch.cat, zip(self, other, strict=True)))

    def only(self, kept: torch.Tensor) -> Columns:
        """The rows that `kept` chooses."""
        return Columns(*(column[kept] for column in self))


class Running:
    """n rows, one a running request, in no order that matters."""

    def __init__(
        self, vocab_size: int, device: torch.device, max_rows: int, expected: Sequence[ScheduledRequest]
    ) -> None:
        self._vocab_size, self._max_rows = vocab_size, max_rows
        self.live: list[ScheduledRequest] = []  # by row
        self.stops: list[StopStrings | None] = []  # by row
        self.columns = Columns.of([], [], device)
        self.sampling = SamplingState.of([], vocab_size, device)  # by row
        rows = min(max_rows, len(expected))
        longest = max(each.request.params.max_new_tokens for each in expected)
        self.tables = torch.zeros(rows, max(each.most_blocks for each in expected), dtype=torch.int32, device=device)
        self.out_tokens = torch.zeros(rows, longest, dtype=torch.int64, device=device)
        self.out_log_probs = torch.empty(rows, longest, dtype=torch.float32, device=device)
        self._free_slots = list(range(rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.live)

    def add(self, live: Sequence[ScheduledRequest], stops: Sequence[StopStrings | None]) -> None:
        """Adds a row for each request; a new request gets its first token from the next call of `sample`."""
        self._make_room(live)
        device = self.tables.device
        slots = [self._free_slots.pop() for _ in live]
        width = max(len(each.blocks) for each in live)
        tables = [each.blocks + [0] * (width - len(each.blocks)) for each in live]
        self.tables[slots, :width] = torch.tensor(tables, dtype=torch.int32, device=device)
        for slot, each in zip(slots, live, strict=True):
            if each.tokens:
                self.out_tokens[slot, : len(each.tokens)] = torch.tensor(each.tokens, device=device)
                self.out_log_probs[slot, : len(each.tokens)] = torch.tensor(each.log_probs, device=device)
        self.columns = self.columns.joined(Columns.of(live, slots, device))
        self.live += live
        self.stops += stops
        self.sampling = SamplingState.of([each.request for each in self.live], self._vocab_size, device)

    def sample(self, logits: torch.Tensor, first: int = 0) -> None:
        """The next token of the rows from `first` on, from their logits."""
        rows, columns = slice(first, None), self.columns
        own = self.sampling if first == 0 else self.sampling.rows(rows)
        slots, counts = columns.slots[rows], columns.counts[rows]
        generated = None
        if own.constraints is not None:
            generated = self.out_tokens[slots, : max(1, int(counts.max()))]
        tokens, log_probs = sample(logits, own, counts, generated)
        if own.num_likeliest:
            for live, told in zip(self.live[rows], likeliest(logits, own), strict=True):
                live.tell(told)
        self.out_tokens[slots, counts] = tokens
        self.out_log_probs[slots, counts] = log_probs
        columns.tokens[rows] = tokens
        columns.positions[rows] += 1
        columns.counts[rows] += 1

    def without_room(self) -> list[ScheduledRequest]:
        """The requests whose next token begins a block."""
        rows = (self.columns.positions % BLOCK_SIZE == 0).nonzero().squeeze(1)
        return [self.live[row] for row in rows.tolist()]

    def extend(self, blocks: Mapping[ScheduledRequest, int]) -> None:
        """Enters one block more for some of the requests without room."""
        if not blocks:
            return
        rows = [row for row, each in enumerate(self.live) if each in blocks]
        new = torch.tensor([blocks[self.live[row]] for row in rows], dtype=torch.int32, device=self.tables.device)
        columns = self.columns
        self.tables[columns.slots[rows], columns.positions[rows] // BLOCK_SIZE] = new

    def read(self) -> None:
        """Copies the tokens and log-probs so far into every request."""
        if self.live:
            self._read(self.live, self.columns)

    def read_newest(self, live: Sequence[ScheduledRequest]) -> None:
        """Copies the tokens and log-probs sampled since the last call into those of these requests that are running."""
        chosen = set(live)
        rows = [row for row, each in enumerate(self.live) if each in chosen]
        if not rows:
            return
        device, some = self.tables.device, [self.live[row] for row in rows]
        where = torch.tensor(rows, device=device)
        first = torch.tensor([len(each.tokens) for each in some], device=device)
        new = self.columns.counts[where] - first
        at = first[:, None] + torch.arange(int(new.max()), device=device)
        at.clamp_(max=self.out_tokens.shape[1] - 1)
        slots = self.columns.slots[where, None]
        outputs = (out[slots, at].tolist() for out in (self.out_tokens, self.out_log_probs))
        for each, count, tokens, log_probs in zip(some, new.tolist(), *outputs, strict=True):
            each.tokens += tokens[:count]
            each.log_probs += log_probs[:count]

    def remove(self, live: Sequence[ScheduledRequest]) -> None:
        """Takes out the rows of requests; their tokens were read."""
        gone = set(live)
        self._keep([row for row, each in enumerate(self.live) if each not in gone])

    def finish(self) -> list[Done[ScheduledRequest]]:
        """Takes out the requests that are done, with all their tokens."""
        stopped = is_stop(self.columns.tokens, self.sampling)
        found = self._found_stops(stopped) if any(self.stops) else {}
        if found:
            stopped[list(found)] = True
        ended = stopped | (self.columns.counts >= self.sampling.limits)
        if not bool(ended.any()):
            return []
        rows = ended.nonzero().squeeze(1)
        some, chosen = self.columns.only(rows), rows.tolist()
        self._read([self.live[row] for row in chosen], some)
        reasons: list[FinishReason] = ["stop" if stop else "length" for stop in stopped[rows].tolist()]
        done = [(self.live[row], reason, found.get(row)) for row, reason in zip(chosen, reasons, strict=True)]
        self._keep((~ended).nonzero().squeeze(1).tolist())
        return done

    def _found_stops(self, stopped: torch.Tensor) -> dict[int, str]:
        """The stop string that the newest token of a row completes, by row; a stop token comes before one."""
        found: dict[int, str] = {}
        columns = self.columns
        each = zip(
            self.stops,
            *(column.tolist() for column in (stopped, columns.tokens, columns.slots, columns.counts)),
            strict=True,
        )
        for row, (stops, ended, token, slot, count) in enumerate(each):
            if stops is None or ended:
                continue
            string = stops.found(token, self.out_tokens[slot, :count])
            if string is not None:
                found[row] = string
        return found

    def _read(self, live: Sequence[ScheduledRequest], columns: Columns) -> None:
        longest = int(columns.counts.max())
        outputs = (out[columns.slots, :longest].tolist() for out in (self.out_tokens, self.out_log_probs))
        for each, count, tokens, log_probs in zip(live, columns.counts.tolist(), *outputs, strict=True):
            each.tokens, each.log_probs = tokens[:count], log_probs[:count]

    def _keep(self, rows: list[int]) -> None:
        kept = torch.tensor(rows, dtype=torch.int64, device=self.tables.device)
        gone = torch.ones(len(self), dtype=torch.bool, device=kept.device)
        gone[kept] = False
        self._free_slots += self.columns.slots[gone].tolist()
        self.live, self.stops = [self.live[row] for row in rows], [self.stops[row] for row in rows]
        self.columns, self.sampling = self.columns.only(kept), self.sampling.rows(kept)

    def _make_room(self, live: Sequence[ScheduledRequest]) -> None:
        """Enlarges tables and outputs where more or longer requests came than were expected."""
        rows = min(self._max_rows, 2 * (len(self) + len(live))) - len(self.tables)
        if len(live) > len(self._free_slots):
            self._free_slots = [*range(len(self.tables) + rows - 1, len(self.tables) - 1, -1), *self._free_slots]
        else:
            rows = 0
        blocks = max(0, max(each.most_blocks for each in live) - self.tables.shape[1])
        tokens = max(0, max(each.request.params.max_new_tokens for each in live) - self.out_tokens.shape[1])
        if rows or blocks:
            self.tables = F.pad(self.tables, (0, blocks, 0, rows))
        if rows or tokens:
            self.out_tokens = F.pad(self.out_tokens, (0, tokens, 0, rows))
            self.out_log_probs = F.pad(self.out_log_probs, (0, tokens, 0, rows))
