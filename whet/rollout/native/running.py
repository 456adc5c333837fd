# SPDX-License-Identifier: Apache-2.0
"""The requests being decoded. Each has a fixed slot: rows enter and leave by slot number, and never move."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from whet.devices import HOST
from whet.kernels.paged_attention import BLOCK_SIZE
from whet.kernels.sampling import SamplingState, is_stop, likeliest
from whet.rollout.in_process import Done
from whet.rollout.native.cache import BlockCache
from whet.rollout.native.columns import Columns, Forward, Rows, SampledTokens
from whet.rollout.native.scheduler import ScheduledRequest
from whet.rollout.protocol import Likeliest
from whet.rollout.stop_strings import StopStrings
from whet.types import FinishReason

Routing = Callable[[], list[bytes]]  # experts of each row of the last pass


class SampledStep(NamedTuple):
    """The tokens sampled for n rows. They may still be on the device."""

    slots: torch.Tensor  # [n]
    guests: torch.Tensor  # [n] numbers of the requests that had the slots
    counts: torch.Tensor  # [n] tokens of each response before
    sampled: SampledTokens
    told: list[Likeliest] | None
    routed: list[bytes] | None


class RunningSlots:
    """Slots of running requests. A decision that depends on a token is made when the token arrives from the device, at
    most one step late. A token sampled after the end of a response is dropped."""

    def __init__(self, vocab_size: int, columns: Columns, max_rows: int, expected: Sequence[ScheduledRequest]) -> None:
        self._vocab_size, self._max_rows, self.columns = vocab_size, max_rows, columns
        self.order = torch.zeros(0, dtype=torch.int64)  # slots of the rows that are sampled next
        self.live: dict[int, ScheduledRequest] = {}  # by slot
        self.stops: dict[int, StopStrings] = {}  # by slot, where there are some
        rows = min(max_rows, len(expected))
        longest = max(each.request.params.max_new_tokens for each in expected)
        self.positions, self.shifts, self.counts, self._guests, self._limits = torch.zeros(5, rows, dtype=torch.int64)
        self.out_tokens = torch.zeros(rows, longest, dtype=torch.int64)
        self.out_log_probs = torch.empty(rows, longest, dtype=torch.float32)
        self._stop_ids = torch.zeros(rows, 0, dtype=torch.int64)
        self.sampling = SamplingState.of([], vocab_size, HOST)  # by slot, on the device
        self._free_slots = list(range(rows - 1, -1, -1))
        self._coming: deque[SampledStep] = deque()
        self._done: list[Done[ScheduledRequest]] = []
        columns.resize(rows, max(each.most_blocks for each in expected))

    def __len__(self) -> int:
        return len(self.order)

    def add(self, live: Sequence[ScheduledRequest], stops: Sequence[StopStrings | None]) -> torch.Tensor:
        """Gives each request a slot, and returns the slots. For a new request `begin` samples the first token."""
        self._make_room(live)
        chosen = [self._free_slots.pop() for _ in live]
        for slot, each, strings in zip(chosen, live, stops, strict=True):
            self.live[slot] = each
            if strings is not None:
                self.stops[slot] = strings
            if each.tokens:
                self.out_tokens[slot, : len(each.tokens)] = torch.tensor(each.tokens)
                self.out_log_probs[slot, : len(each.tokens)] = torch.tensor(each.log_probs)
        slots = torch.tensor(chosen, dtype=torch.int64)
        self.positions[slots] = torch.tensor([len(each.prompt.token_ids) + len(each.tokens) - 1 for each in live])
        self.shifts[slots] = torch.tensor([each.prompt.shift for each in live])
        self.counts[slots] = torch.tensor([len(each.tokens) for each in live])
        self._guests[slots] += 1
        self.columns.enter(
            slots, [each.tokens[-1] if each.tokens else 0 for each in live], [each.blocks for each in live]
        )
        self.order = torch.cat([self.order, slots])
        self._read_sampling()
        return slots

    @property
    def _late(self) -> int:
        """The number of steps that may be in flight when the next begins; 0 if constraints read all tokens."""
        return 0 if self.sampling.constraints is not None else self.columns.late

    def decode(self, forward: Forward, cache: BlockCache, routing: Routing | None = None) -> None:
        """Feeds the newest token of every row and samples the next."""
        rows = self._rows(self.order)
        logits, sampled = self.columns.decode(forward, cache, rows)
        self._note(rows, logits, sampled, None if routing is None else routing()[: len(rows.slots)])

    def begin(self, logits: torch.Tensor, slots: torch.Tensor, routed: list[bytes] | None = None) -> None:
        """Samples the first token of the rows in `slots`, from the `logits` after their prompts."""
        rows = self._rows(slots)
        self._note(rows, logits, self.columns.pick(logits, rows), routed)

    def _rows(self, slots: torch.Tensor) -> Rows:
        counts, generated = self.counts[slots], None
        if self.sampling.constraints is not None:
            generated = self.out_tokens[slots, : max(1, int(counts.max()))]
        return Rows(slots, self.positions[slots], self.shifts[slots], counts, self.sampling, generated)

    def _note(self, rows: Rows, logits: torch.Tensor, sampled: SampledTokens, routed: list[bytes] | None) -> None:
        slots = rows.slots
        told = likeliest(logits, self.sampling.rows(slots)) if self.sampling.num_likeliest else None
        self._coming.append(SampledStep(slots, self._guests[slots], rows.counts, sampled, told, routed))
        self.positions[slots] += 1
        self.counts[slots] += 1
        if self._late:  # a row whose last token is in flight is not sampled again
            has_room = self.counts[self.order] < self._limits[self.order]
            self.order = self.order if bool(has_room.all()) else self.order[has_room]

    def without_room(self) -> list[ScheduledRequest]:
        """The requests whose next token needs a new block."""
        return [self.live[slot] for slot in self.order[self.positions[self.order] % BLOCK_SIZE == 0].tolist()]

    def extend(self, blocks: Mapping[ScheduledRequest, int]) -> None:
        """Adds the new blocks of requests without room to their block tables."""
        if not blocks:
            return
        slots = [slot for slot in self.order.tolist() if self.live[slot] in blocks]
        new = [blocks[self.live[slot]] for slot in slots]
        where = torch.tensor(slots)
        self.columns.extend(where, self.positions[where] // BLOCK_SIZE, torch.tensor(new, dtype=torch.int32))

    def read(self) -> None:
        """Copies the tokens and log-probs sampled so far into every running request."""
        self._settle(0)
        for slot, live in self.live.items():
            self._read(slot, live)

    def read_newest(self, live: Sequence[ScheduledRequest]) -> None:
        """Copies the tokens and log-probs since the last call into these requests, if they are running."""
        chosen, coming = set(live), self._counts_coming()
        for slot, each in self.live.items():
            if each in chosen:
                new = slice(len(each.tokens), int(self.counts[slot]) - coming.get(slot, 0))
                each.tokens += self.out_tokens[slot, new].tolist()
                each.log_probs += self.out_log_probs[slot, new].tolist()

    def remove(self, live: Sequence[ScheduledRequest]) -> None:
        """Removes requests. The caller has called `read` before."""
        gone = set(live)
        self._done = [each for each in self._done if each[0] not in gone]
        self._free([slot for slot, each in self.live.items() if each in gone])

    def finish(self) -> list[Done[ScheduledRequest]]:
        """Removes and returns finished requests, with all their tokens. Waits for the last step if none can follow."""
        self._settle(self._late if len(self.order) else 0)
        done, self._done = self._done, []
        return done

    def _settle(self, late: int) -> None:
        """Stores the tokens of all steps in flight except the `late` newest, and removes the requests that end."""
        while len(self._coming) > late:
            step = self._coming.popleft()
            tokens, log_probs = step.sampled.here()
            same = self._guests[step.slots] == step.guests
            if not bool(same.all()):
                rows = same.nonzero().squeeze(1)
                kept = step.slots[rows], step.guests[rows], step.counts[rows]
                step = SampledStep(*kept, step.sampled, step.told, step.routed)
                tokens, log_probs = tokens[rows], log_probs[rows]
                if step.told is not None:
                    step = step._replace(told=[step.told[row] for row in rows.tolist()])
                if step.routed is not None:
                    step = step._replace(routed=[step.routed[row] for row in rows.tolist()])
            self._enter(step, tokens, log_probs)

    def _enter(self, step: SampledStep, tokens: torch.Tensor, log_probs: torch.Tensor) -> None:
        slots, counts = step.slots, step.counts
        self.out_tokens[slots, counts], self.out_log_probs[slots, counts] = tokens, log_probs
        if step.told is not None:
            for slot, told in zip(slots.tolist(), step.told, strict=True):
                self.live[slot].tell(told)
        if step.routed is not None:
            for slot, routed in zip(slots.tolist(), step.routed, strict=True):
                self.live[slot].routed.append(routed)
        stopped = is_stop(tokens, self._stop_ids[slots])
        found = self._found_stops(slots, stopped, tokens, counts) if self.stops else {}
        if found:
            stopped[list(found)] = True
        ended = stopped | (counts + 1 >= self._limits[slots])
        if not bool(ended.any()):
            return
        rows = ended.nonzero().squeeze(1).tolist()
        for row, slot, is_stopped in zip(rows, slots[rows].tolist(), stopped[rows].tolist(), strict=True):
            live, reason = self.live[slot], FINISHED[is_stopped]
            self._read(slot, live, int(counts[row]) + 1)
            self._done.append((live, reason, found.get(row)))
        self._free(slots[rows].tolist())

    def _found_stops(
        self, slots: torch.Tensor, stopped: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor
    ) -> dict[int, str]:
        """Finds the stop string that each row's newest token completes, by row. Stop tokens take precedence."""
        found: dict[int, str] = {}
        each = zip(*(column.tolist() for column in (slots, stopped, tokens, counts)), strict=True)
        for row, (slot, ended, token, count) in enumerate(each):
            if ended or slot not in self.stops:
                continue
            string = self.stops[slot].found(token, self.out_tokens[slot, : count + 1])
            if string is not None:
                found[row] = string
        return found

    def _read(self, slot: int, live: ScheduledRequest, count: int | None = None) -> None:
        count = int(self.counts[slot]) if count is None else count
        live.tokens = self.out_tokens[slot, :count].tolist()
        live.log_probs = self.out_log_probs[slot, :count].tolist()

    def _counts_coming(self) -> dict[int, int]:
        """Counts, by slot, the tokens that are sampled but still in flight."""
        found: dict[int, int] = {}
        for step in self._coming:
            for slot, is_same in zip(
                step.slots.tolist(), (self._guests[step.slots] == step.guests).tolist(), strict=True
            ):
                found[slot] = found.get(slot, 0) + is_same
        return found

    def _free(self, slots: Sequence[int]) -> None:
        for slot in slots:
            del self.live[slot]
            self.stops.pop(slot, None)
        if slots:
            self._free_slots += slots
            gone = torch.tensor(slots)
            self._guests[gone] += 1
            self.order = self.order[~torch.isin(self.order, gone)]

    def _read_sampling(self) -> None:
        """Makes the sampling parameters of all slots again; free slots get the parameters of any request."""
        anybody = next(iter(self.live.values()))
        requests = [self.live.get(slot, anybody).request for slot in range(len(self.counts))]
        here = SamplingState.of(requests, self._vocab_size, HOST)
        self._stop_ids, self._limits, self.sampling = here.stop_ids, here.limits, self.columns.moved(here)

    def _make_room(self, live: Sequence[ScheduledRequest]) -> None:
        """Enlarges slots and outputs if there are more or longer requests than expected."""
        have = len(self.counts)
        rows = min(self._max_rows, 2 * (len(self.live) + len(live))) - have
        if len(live) > len(self._free_slots):
            self._free_slots = [*range(have + rows - 1, have - 1, -1), *self._free_slots]
        else:
            rows = 0
        tokens = max(0, max(each.request.params.max_new_tokens for each in live) - self.out_tokens.shape[1])
        if rows:
            columns = torch.stack([self.positions, self.shifts, self.counts, self._guests, self._limits])
            self.positions, self.shifts, self.counts, self._guests, self._limits = F.pad(columns, (0, rows))
        if rows or tokens:
            self.out_tokens = F.pad(self.out_tokens, (0, tokens, 0, rows))
            self.out_log_probs = F.pad(self.out_log_probs, (0, tokens, 0, rows))
        self.columns.resize(have + rows, max(each.most_blocks for each in live))


FINISHED: dict[bool, FinishReason] = {True: "stop", False: "length"}
