# SPDX-License-Identifier: Apache-2.0
"""The slow, obvious rollout engine: transformers' own forward and cache, left padding, every row until all are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from whet.errors import DeadlineError
from whet.models.lora import plain_copy
from whet.rollout.policy import Policy
from whet.rollout.protocol import Claim, Completion, Request
from whet.rollout.sampling import SamplingState, is_stop, sample
from whet.rollout.stop_strings import StopStrings, stop_strings_of


class HFEngine:
    """Works for every causal language model that transformers has; the native engine is measured against it."""

    def __init__(
        self,
        *,
        dtype: torch.dtype = torch.float32,
        max_batch_size: int = 256,
        deadline_seconds: float = 3600.0,
        load_tokenizer: Callable[[], PreTrainedTokenizerBase] | None = None,
    ) -> None:
        self.load_tokenizer = load_tokenizer  # called only where requests have stop strings
        self.dtype, self.max_batch_size, self.deadline_seconds = dtype, max_batch_size, deadline_seconds
        self._policy = Policy()

    def attach(self, module: PreTrainedModel, version: int, *, is_own: bool = False) -> None:
        """Samples from `module` itself from now on."""
        self._policy.set(module, version, is_own=is_own)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Fills the engine's own module.  Raises: WeightSyncError; whatever `weights` raises."""
        self._policy.fill(weights, version)

    def adopt(self, module: PreTrainedModel) -> None:
        """Makes an own module of the same shape, without adapters, in the rollout dtype."""
        # mypy takes transformers' decorated `to` for a plain function
        own = plain_copy(module).to(self.dtype).requires_grad_(False)  # type: ignore[arg-type]
        self._policy.set(own, self._policy.version, is_own=True)

    def sleep(self) -> None:
        """Frees the device of an own module: the cache lives only during `generate`."""
        self._policy.leave_device()

    def wake(self) -> None:
        """Puts an own module back."""
        self._policy.return_to_device()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order.  Raises: EngineError, WeightSyncError, DeadlineError."""
        deadline = time.monotonic() + self.deadline_seconds
        done: list[Completion] = []
        for start in range(0, len(requests), self.max_batch_size):
            done += self._generate_batch(requests[start : start + self.max_batch_size], deadline)
        return done

    def answer(self, requests: Sequence[Request], claim: Claim) -> dict[int, Completion]:
        """Completions of the requests that `claim` gives: it is asked again when all of them are done."""
        done: dict[int, Completion] = {}
        while claimed := claim(0, self.max_batch_size):
            done |= zip(claimed, self.generate([requests[index] for index in claimed]), strict=True)
        return done

    @torch.no_grad()
    def _generate_batch(self, requests: Sequence[Request], deadline: float) -> list[Completion]:
        module = self._policy.require_whole()
        device = module.device
        width = max(len(request.token_ids) for request in requests)
        padding = [width - len(request.token_ids) for request in requests]
        rows = zip(padding, requests, strict=True)
        ids = torch.tensor([[0] * pad + list(request.token_ids) for pad, request in rows], device=device)
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding], device=device)
        state = SamplingState.of(requests, module.config.get_text_config().vocab_size, device)
        stops = stop_strings_of(requests, self.load_tokenizer)
        cache = DynamicCache(config=module.config)
        longest = max(request.params.max_new_tokens for request in requests)
        tokens = torch.zeros(len(requests), longest, dtype=torch.int64, device=device)
        log_probs = torch.zeros(len(requests), longest, device=device)
        lengths = torch.zeros(len(requests), dtype=torch.int64, device=device)
        stopped = torch.zeros(len(requests), dtype=torch.bool, device=device)
        running = lengths < state.limits
        found: dict[int, str] = {}
        step = 0
        with _plain_attention(module):
            while bool(running.any()):
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"the rollout waited {self.deadline_seconds:g} s for answers; "
                        "raise rollout.deadline_seconds or shorten the answers"
                    )
                positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                out = module(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1)
                chosen, log_probs[:, step] = sample(out.logits[:, -1], state, lengths, tokens[:, : max(1, step)])
                tokens[:, step] = chosen
                step += 1
                lengths += running
                stopped |= running & is_stop(chosen, state)
                going_on = (running & ~stopped).nonzero().squeeze(1).tolist()
                new = _found_stops(stops, going_on, tokens[:, :step]) if any(stops) else {}
                stopped[list(new)] = True
                found |= new
                running &= ~stopped & (lengths < state.limits)
                ids, mask = chosen[:, None], torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        ended = zip(tokens.tolist(), log_probs.tolist(), lengths.tolist(), stopped.tolist(), strict=True)
        return [
            Completion(
                *(tuple(ids_[:length]), tuple(values[:length]), "stop" if stop else "length", self._policy.version),
                stop=found.get(row),
            )
            for row, (ids_, values, length, stop) in enumerate(ended)
        ]


def _found_stops(stops: Sequence[StopStrings | None], rows: Sequence[int], tokens: torch.Tensor) -> dict[int, str]:
    """The stop string that the last of `tokens` [S, T] completes, by row."""
    found: dict[int, str] = {}
    for row, newest in zip(rows, tokens[list(rows), -1].tolist(), strict=True):
        own = stops[row]
        string = None if own is None else own.found(newest, tokens[row])
        if string is not None:
            found[row] = string
    return found


@contextmanager
def _plain_attention(module: PreTrainedModel) -> Iterator[None]:
    """transformers' own attention, and no dropout, for as long as the block lasts."""
    implementation, training = module.config._attn_implementation, module.training
    module.set_attn_implementation("sdpa" if module._supports_sdpa else "eager")
    module.eval()
    try:
        yield
    finally:
        module.set_attn_implementation(implementation)
        module.train(training)
