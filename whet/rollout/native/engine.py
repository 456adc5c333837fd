# SPDX-License-Identifier: Apache-2.0
"""The native rollout engine: admit, prefill, decode, finish, until nothing waits and nothing runs.

Every matrix product has at least 16 rows and attention is computed token by token, so a request gives the same tokens
alone and among others (kernels for fewer rows round differently).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from whet.errors import DeadlineError, EngineError
from whet.models.attention import NAME
from whet.models.log_probs import LogitForm
from whet.models.lora import plain_copy
from whet.rollout.native.cache import BlockCache, PagedBatch, blocks_for
from whet.rollout.native.scheduler import Admitted, Scheduler, SharedPrompt
from whet.rollout.protocol import Completion, Request
from whet.rollout.sampling import SamplingState, is_stop, sample
from whet.types import FinishReason

MIN_ROWS = 16
PREFILL_TOKENS = 4096  # prompts computed together; a longer one is computed alone


class Running:
    """The requests being decoded, as columns: n rows, one a request, in no order that matters."""

    def __init__(
        self, sampling: SamplingState, capacity: int, table_width: int, longest: int, device: torch.device
    ) -> None:
        self.sampling = sampling  # of all requests
        self.index = torch.empty(0, dtype=torch.int64, device=device)  # [n] which request
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)  # [n] sampled last, to be fed next
        self.positions = torch.empty(0, dtype=torch.int64, device=device)  # [n] where that token stands
        self.counts = torch.empty(0, dtype=torch.int64, device=device)  # [n] tokens sampled so far
        self.slots = torch.empty(0, dtype=torch.int64, device=device)  # [n] row of `tables` and of the outputs
        self.tables = torch.zeros(capacity, table_width, dtype=torch.int32, device=device)
        self.out_tokens = torch.empty(capacity, longest, dtype=torch.int64, device=device)
        self.out_log_probs = torch.empty(capacity, longest, dtype=torch.float32, device=device)
        self.own = sampling.rows(self.index)  # of the n requests
        self.blocks: dict[int, list[int]] = {}  # by request
        self._free_slots = list(range(capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.index)

    def add(self, admitted: Sequence[Admitted]) -> None:
        """Rows for new requests; their first token comes with `record`."""
        device = self.index.device
        slots = [self._free_slots.pop() for _ in admitted]
        self.blocks.update({each.index: each.blocks for each in admitted})
        width = max(len(each.blocks) for each in admitted)
        tables = [each.blocks + [0] * (width - len(each.blocks)) for each in admitted]
        self.tables[slots, :width] = torch.tensor(tables, dtype=torch.int32, device=device)
        new = {
            "index": [each.index for each in admitted],
            "tokens": [0] * len(admitted),
            "positions": [len(each.prompt.token_ids) - 1 for each in admitted],
            "counts": [0] * len(admitted),
            "slots": slots,
        }
        for name, values in new.items():
            vars(self)[name] = torch.cat([vars(self)[name], torch.tensor(values, dtype=torch.int64, device=device)])
        self.own = self.sampling.rows(self.index)

    def record(self, rows: slice, tokens: torch.Tensor, log_probs: torch.Tensor) -> None:
        """The next sampled token of some rows."""
        self.out_tokens[self.slots[rows], self.counts[rows]] = tokens
        self.out_log_probs[self.slots[rows], self.counts[rows]] = log_probs
        self.tokens[rows] = tokens
        self.positions[rows] += 1
        self.counts[rows] += 1

    def finish(self, version: int) -> dict[int, tuple[Completion, list[int]]]:
        """Takes out the rows that are done: their completions and blocks, by request."""
        stopped = is_stop(self.tokens, self.own)
        ended = stopped | (self.counts >= self.own.limits)
        if not bool(ended.any()):
            return {}
        slots, counts = self.slots[ended], self.counts[ended].tolist()
        columns = (self.index[ended].tolist(), slots.tolist(), counts, stopped[ended].tolist())
        longest = max(counts)
        tokens, log_probs = self.out_tokens[slots, :longest].tolist(), self.out_log_probs[slots, :longest].tolist()
        done: dict[int, tuple[Completion, list[int]]] = {}
        for index, slot, count, stop, ids, values in zip(*columns, tokens, log_probs, strict=True):
            reason: FinishReason = "stop" if stop else "length"
            completion = Completion(tuple(ids[:count]), tuple(values[:count]), reason, version)
            done[index] = (completion, self.blocks.pop(index))
            self._free_slots.append(slot)
        going_on = ~ended
        for name in ("index", "tokens", "positions", "counts", "slots"):
            vars(self)[name] = vars(self)[name][going_on]
        self.own = self.sampling.rows(self.index)
        return done


class NativeEngine:
    """Continuous batching over a block KV cache, with the model's own modules and whet's attention."""

    def __init__(
        self,
        *,
        dtype: torch.dtype = torch.float32,
        max_batch_size: int = 256,
        kv_cache_bytes: int = 2**30,
        compile_decode: bool = False,
        deadline_seconds: float = 3600.0,
    ) -> None:
        self.dtype, self.max_batch_size, self.kv_cache_bytes = dtype, max_batch_size, kv_cache_bytes
        self.compile_decode, self.deadline_seconds = compile_decode, deadline_seconds
        self.version = -1
        self._module: PreTrainedModel | None = None
        self._form = LogitForm()
        self._decode: Callable[..., torch.Tensor] | None = None
        self._cache: BlockCache | None = None

    def attach(self, module: PreTrainedModel, version: int) -> None:
        """Samples from `module` itself, without a copy, from now on.  Raises: EngineError without whet's attention."""
        if module is not self._module:
            if module.config._attn_implementation != NAME:
                raise EngineError(
                    f"the model was loaded with {module.config._attn_implementation!r} attention, not {NAME!r}"
                )
            self._module, self._cache = module, None
            self._form = LogitForm.of(module.config.get_text_config())
            self._decode = torch.compile(self._forward) if self.compile_decode else self._forward
        self.version = version

    def adopt(self, module: PreTrainedModel) -> None:
        """Makes a module of its own like `module`, without adapters and in the rollout dtype, for `load_weights`."""
        own = plain_copy(module).requires_grad_(False)
        torch.nn.Module.to(own, self.dtype)  # in place
        self.attach(own, self.version)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Fills the engine's own module."""
        own = dict(self._require_module().named_parameters())
        with torch.no_grad():
            for name, weight in weights:
                own[name].copy_(weight)
        self.version = version

    def sleep(self) -> None:
        """Frees the cache."""
        self._cache = None

    def wake(self) -> None:
        """Does nothing: the cache is made when it is needed."""

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order.  Raises: EngineError, DeadlineError."""
        if not requests:
            return []
        module, deadline = self._require_module(), time.monotonic() + self.deadline_seconds
        cache = self._require_cache()
        scheduler = Scheduler(requests, cache, self.max_batch_size)
        running = Running(
            SamplingState.of(requests, module.device),
            capacity=min(self.max_batch_size, len(requests)),
            table_width=max(blocks_for(len(r.token_ids) + r.params.max_new_tokens) for r in requests),
            longest=max(request.params.max_new_tokens for request in requests),
            device=module.device,
        )
        done: dict[int, Completion] = {}
        with _evaluating(module):
            while len(done) < len(requests):
                admitted = scheduler.admit(len(running))
                if admitted:
                    self._prefill(scheduler, admitted, running)
                else:
                    self._decode_step(cache, running)
                for index, (completion, blocks) in running.finish(self.version).items():
                    done[index] = completion
                    cache.release(blocks)
                if time.monotonic() > deadline:
                    self._cache = None
                    raise DeadlineError(
                        f"the rollout waited {self.deadline_seconds:.0f} s for {len(requests) - len(done)} of "
                        f"{len(requests)} answers; raise rollout.deadline_seconds or shorten the answers"
                    )
        return [done[index] for index in range(len(requests))]

    def _prefill(self, scheduler: Scheduler, admitted: Sequence[Admitted], running: Running) -> None:
        """Computes the prompts that were not yet, and samples the first token of every admitted request."""
        prompts = {id(each.prompt): each.prompt for each in admitted if each.prompt.logits is None}
        for batch in _by_tokens(list(prompts.values())):
            self._prefill_prompts(batch)
        scheduler.copy_partial_blocks(admitted)
        logits = torch.stack([each.prompt.logits for each in admitted if each.prompt.logits is not None])
        new = slice(len(running), len(running) + len(admitted))
        running.add(admitted)
        state = running.sampling.rows(running.index[new])
        running.record(new, *sample(logits, state, running.counts[new]))

    def _prefill_prompts(self, prompts: Sequence[SharedPrompt]) -> None:
        device = self._require_module().device
        ids = torch.tensor([token for prompt in prompts for token in prompt.token_ids], device=device)
        lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts], device=device)
        ends = lengths.cumsum(0)
        rows = torch.arange(len(prompts), dtype=torch.int32, device=device).repeat_interleave(lengths)
        positions = torch.arange(len(ids), device=device) - (ends - lengths).repeat_interleave(lengths)
        tables = torch.zeros(len(prompts), max(len(prompt.blocks) for prompt in prompts), dtype=torch.int32)
        for row, prompt in enumerate(prompts):
            tables[row, : len(prompt.blocks)] = torch.tensor(prompt.blocks, dtype=torch.int32)
        last = F.pad(ends - 1, (0, max(0, MIN_ROWS - len(prompts))))
        logits = self._forward(*self._padded(self._require_cache(), ids, rows, positions, tables.to(device)), last)
        for row, prompt in enumerate(prompts):
            prompt.logits = logits[row]

    def _decode_step(self, cache: BlockCache, running: Running) -> None:
        """Feeds the last token of every running request and samples the next."""
        inputs = self._padded(cache, running.tokens, running.slots.int(), running.positions, running.tables)
        assert self._decode is not None
        logits = self._decode(*inputs, None)[: len(running)]
        running.record(slice(None), *sample(logits, running.own, running.counts))

    def _padded(
        self, cache: BlockCache, ids: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, tables: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
        """Inputs of `_forward`, padded to one of few sizes: an eighth more rows at the most, of many."""
        step = max(MIN_ROWS, 1 << max(0, (len(ids) - 1).bit_length() - 3))
        extra = -len(ids) % step
        positions = F.pad(positions, (0, extra))
        return (
            F.pad(ids, (0, extra)),
            positions,
            PagedBatch(cache, tables, F.pad(rows, (0, extra), value=-1), positions),
        )

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, paged: PagedBatch, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits after each token, or after those in `keep`: [T] -> [T, V]."""
        module = self._require_module()
        out = module.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False, paged=paged)
        hidden = out.last_hidden_state[0]
        return self._form(module.get_output_embeddings()(hidden if keep is None else hidden[keep]))

    def _require_module(self) -> PreTrainedModel:
        if self._module is None:
            raise EngineError("the rollout engine has no weights yet: attach a module, or adopt one and load weights")
        return self._module

    def _require_cache(self) -> BlockCache:
        if self._cache is None:
            module = self._require_module()
            self._cache = BlockCache(
                module.config.get_text_config(),
                dtype=module.dtype,
                budget_bytes=self.kv_cache_bytes,
                device=module.device,
            )
        return self._cache


def _by_tokens(prompts: Sequence[SharedPrompt]) -> Iterator[list[SharedPrompt]]:
    """Prompts in batches of at most PREFILL_TOKENS tokens, or one."""
    batch: list[SharedPrompt] = []
    for prompt in prompts:
        if batch and sum(len(each.token_ids) for each in [*batch, prompt]) > PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


@contextmanager
def _evaluating(module: PreTrainedModel) -> Iterator[None]:
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
