# SPDX-License-Identifier: Apache-2.0
"""The native rollout engine: admit, prefill, grow, decode, finish, until nothing waits and nothing runs.

Every matrix product has at least 16 rows and attention is computed token by token, so a request gives the same tokens
alone and among others (kernels for fewer rows round differently).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from whet.errors import DeadlineError, EngineError
from whet.metrics import counted
from whet.models.attention import NAME
from whet.models.log_probs import LogitForm
from whet.models.lora import plain_copy
from whet.rollout.native.cache import BlockCache, PagedBatch, blocks_for
from whet.rollout.native.paged_attention import BLOCK_SIZE
from whet.rollout.native.running import Running
from whet.rollout.native.scheduler import Answer, Scheduler
from whet.rollout.policy import Policy
from whet.rollout.protocol import Claim, Completion, Request
from whet.rollout.sampling import SamplingState
from whet.rollout.share import everything
from whet.rollout.stop_strings import stop_strings_of

MIN_ROWS = 16
PREFILL_TOKENS = 4096  # computed together; a longer prompt is computed alone


@dataclass(frozen=True)
class Stretch:
    """Tokens to be computed that lie one after the other in one sequence."""

    token_ids: Sequence[int]
    start: int  # where the first one stands
    blocks: list[int]  # of the sequence


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
        load_tokenizer: Callable[[], PreTrainedTokenizerBase] | None = None,
    ) -> None:
        self.load_tokenizer = load_tokenizer  # called only where requests have stop strings
        self.dtype, self.max_batch_size, self.kv_cache_bytes = dtype, max_batch_size, kv_cache_bytes
        self.compile_decode, self.deadline_seconds = compile_decode, deadline_seconds
        self._policy = Policy()
        self._form = LogitForm()
        self._decode: Callable[..., torch.Tensor] | None = None
        self._cache: BlockCache | None = None

    def attach(self, module: PreTrainedModel, version: int, *, is_own: bool = False) -> None:
        """Samples from `module` itself, without a copy, from now on.  Raises: EngineError without whet's attention."""
        if module is not self._policy.module:
            if module.config._attn_implementation != NAME:
                raise EngineError(
                    f"the model was loaded with {module.config._attn_implementation!r} attention, not {NAME!r}"
                )
            self._cache = None
            self._form = LogitForm.of(module.config.get_text_config())
            self._decode = torch.compile(self._forward) if self.compile_decode else self._forward
        self._policy.set(module, version, is_own=is_own)

    def adopt(self, module: PreTrainedModel) -> None:
        """Makes a module of its own like `module`, without adapters and in the rollout dtype, for `load_weights`."""
        own = plain_copy(module).requires_grad_(False)
        torch.nn.Module.to(own, self.dtype)  # in place
        self.attach(own, self._policy.version, is_own=True)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Fills the engine's own module.  Raises: WeightSyncError; whatever `weights` raises."""
        self._policy.fill(weights, version)

    @property
    def cache_bytes(self) -> int:
        """Memory held for keys and values."""
        return 0 if self._cache is None else self._cache.keys.nbytes + self._cache.values.nbytes

    def sleep(self) -> None:
        """Frees the cache, and the device of an own module."""
        self._cache = None
        self._policy.leave_device()

    def wake(self) -> None:
        """Puts an own module back; the cache is made when it is needed."""
        self._policy.return_to_device()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order.  Raises: EngineError, WeightSyncError, DeadlineError."""
        done = self.answer(requests, everything(len(requests)))
        return [done[index] for index in range(len(requests))]

    @torch.no_grad()
    def answer(self, requests: Sequence[Request], claim: Claim) -> dict[int, Completion]:
        """Completions of the requests that `claim` gives: it is asked again whenever an answer is done.

        Raises: EngineError, WeightSyncError, DeadlineError."""
        if not requests:
            return {}
        module, deadline = self._policy.require_whole(), time.monotonic() + self.deadline_seconds
        stops = stop_strings_of(requests, self.load_tokenizer)
        vocab_size = module.config.get_text_config().vocab_size
        scheduler = Scheduler(requests, self._require_cache(), self.max_batch_size)
        running = Running(
            SamplingState.of(requests, vocab_size, module.device),
            stops,
            capacity=min(self.max_batch_size, len(requests)),
            table_width=max(blocks_for(len(r.token_ids) + r.params.max_new_tokens) for r in requests),
            longest=max(request.params.max_new_tokens for request in requests),
        )
        done: dict[int, Completion] = {}
        with _evaluating(module):
            while True:
                if claimed := claim(scheduler.num_unfinished, self.max_batch_size):
                    scheduler.add(claimed)
                if not scheduler.num_unfinished:
                    return done
                if admitted := scheduler.admit():
                    self._prefill(scheduler, admitted, running)
                else:
                    blocks, preempted = scheduler.grow(running.without_room())
                    running.remove(preempted)
                    running.extend(blocks)
                    self._decode_step(scheduler.cache, running)
                for index, completion in running.finish(self._policy.version).items():
                    done[index] = replace(completion, preemptions=scheduler.finish(index).preemptions)
                    counted(len(done), len(requests))
                if time.monotonic() > deadline:
                    self._cache = None
                    raise DeadlineError(
                        f"the rollout waited {self.deadline_seconds:g} s for {scheduler.num_unfinished} of "
                        f"{scheduler.num_unfinished + len(done)} answers; raise rollout.deadline_seconds or shorten "
                        "the answers"
                    )

    def _prefill(self, scheduler: Scheduler, admitted: Sequence[Answer], running: Running) -> None:
        """Computes the prompts that were not yet and what answers that go on had sampled; samples the first token of
        the others."""
        prompts = [p for p in {id(each.prompt): each.prompt for each in admitted}.values() if p.uncomputed]
        logits = self._compute([Stretch(prompt.uncomputed, 0, prompt.blocks) for prompt in prompts])
        for prompt, after in zip(prompts, logits, strict=True):
            prompt.logits, prompt.uncomputed = after, ()
        resumed, started = ([each for each in admitted if bool(each.tokens) == goes_on] for goes_on in (True, False))
        starts = [each.prompt.num_full * BLOCK_SIZE for each in resumed]
        stretches = [
            Stretch(each.cached_ids[start:], start, each.blocks) for each, start in zip(resumed, starts, strict=True)
        ]
        self._compute([stretch for stretch in stretches if stretch.token_ids])
        first_logits = [each.prompt.logits for each in started if each.prompt.logits is not None]
        scheduler.copy_partial_blocks(started)
        running.add([*resumed, *started])
        if started:
            running.sample(torch.stack(first_logits), first=len(running) - len(started))

    def _compute(self, stretches: Sequence[Stretch]) -> list[torch.Tensor]:
        """Fills the blocks of the stretches.  Returns the logits after each."""
        return [logits for batch in _by_tokens(stretches) for logits in self._compute_batch(batch)]

    def _compute_batch(self, stretches: Sequence[Stretch]) -> torch.Tensor:
        device = self._policy.require().device
        ids = torch.tensor([token for stretch in stretches for token in stretch.token_ids], device=device)
        lengths = torch.tensor([len(stretch.token_ids) for stretch in stretches], device=device)
        starts = torch.tensor([stretch.start for stretch in stretches], device=device)
        ends = lengths.cumsum(0)
        rows = torch.arange(len(stretches), dtype=torch.int32, device=device).repeat_interleave(lengths)
        positions = torch.arange(len(ids), device=device) - (ends - lengths - starts).repeat_interleave(lengths)
        tables = torch.zeros(len(stretches), max(len(stretch.blocks) for stretch in stretches), dtype=torch.int32)
        for row, stretch in enumerate(stretches):
            tables[row, : len(stretch.blocks)] = torch.tensor(stretch.blocks, dtype=torch.int32)
        last = F.pad(ends - 1, (0, max(0, MIN_ROWS - len(stretches))))
        inputs = self._padded(self._require_cache(), ids, rows, positions, tables.to(device))
        return self._forward(*inputs, last)[: len(stretches)]

    def _decode_step(self, cache: BlockCache, running: Running) -> None:
        """Feeds the last token of every running request and samples the next."""
        inputs = self._padded(cache, running.tokens, running.slots.int(), running.positions, running.tables)
        assert self._decode is not None
        running.sample(self._decode(*inputs, None)[: len(running)])

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
        module = self._policy.require()
        out = module.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False, paged=paged)
        hidden = out.last_hidden_state[0]
        return self._form(module.get_output_embeddings()(hidden if keep is None else hidden[keep]))

    def _require_cache(self) -> BlockCache:
        if self._cache is None:
            module = self._policy.require()
            self._cache = BlockCache(
                module.config.get_text_config(),
                dtype=module.dtype,
                budget_bytes=self.kv_cache_bytes,
                device=module.device,
            )
        return self._cache


def _by_tokens(stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """Stretches in batches of at most PREFILL_TOKENS tokens, or one."""
    batch: list[Stretch] = []
    for stretch in stretches:
        if batch and sum(len(each.token_ids) for each in [*batch, stretch]) > PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(stretch)
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
