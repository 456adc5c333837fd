# SPDX-License-Identifier: Apache-2.0
"""The slow, obvious rollout engine: transformers' own forward and cache, left padding, every row until all are done."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import DynamicCache, PreTrainedModel

from whet.errors import DeadlineError, EngineError
from whet.models.lora import plain_copy
from whet.rollout.protocol import Completion, Request
from whet.rollout.sampling import SamplingState, is_stop, sample


class HFEngine:
    """Works for every causal language model that transformers has; the native engine is measured against it."""

    def __init__(
        self, *, dtype: torch.dtype = torch.float32, max_batch_size: int = 256, deadline_seconds: float = 3600.0
    ) -> None:
        self.dtype, self.max_batch_size, self.deadline_seconds = dtype, max_batch_size, deadline_seconds
        self.version = -1
        self._module: PreTrainedModel | None = None

    def attach(self, module: PreTrainedModel, version: int) -> None:
        """Samples from `module` itself from now on."""
        self._module, self.version = module, version

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Fills the engine's own module, which `adopt` made."""
        own = dict(self._require_module().named_parameters())
        with torch.no_grad():
            for name, weight in weights:
                own[name].copy_(weight)
        self.version = version

    def adopt(self, module: PreTrainedModel) -> None:
        """Makes an own module of the same shape, without adapters, in the rollout dtype."""
        # mypy takes transformers' decorated `to` for a plain function
        self._module = plain_copy(module).to(self.dtype).requires_grad_(False)  # type: ignore[arg-type]

    def sleep(self) -> None:
        """Does nothing: the cache lives only during `generate`."""

    def wake(self) -> None:
        """Does nothing: the cache lives only during `generate`."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion a request, in order.  Raises: EngineError, DeadlineError."""
        deadline = time.monotonic() + self.deadline_seconds
        done: list[Completion] = []
        for start in range(0, len(requests), self.max_batch_size):
            done += self._generate_batch(requests[start : start + self.max_batch_size], deadline)
        return done

    @torch.no_grad()
    def _generate_batch(self, requests: Sequence[Request], deadline: float) -> list[Completion]:
        module = self._require_module()
        device = module.device
        width = max(len(request.token_ids) for request in requests)
        padding = [width - len(request.token_ids) for request in requests]
        rows = zip(padding, requests, strict=True)
        ids = torch.tensor([[0] * pad + list(request.token_ids) for pad, request in rows], device=device)
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in padding], device=device)
        state = SamplingState.of(requests, device)
        cache = DynamicCache(config=module.config)
        tokens: list[torch.Tensor] = []
        log_probs: list[torch.Tensor] = []
        lengths = torch.zeros(len(requests), dtype=torch.int64, device=device)
        stopped = torch.zeros(len(requests), dtype=torch.bool, device=device)
        running = lengths < state.limits
        with _plain_attention(module):
            while bool(running.any()):
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"the rollout waited {self.deadline_seconds:.0f} s for answers; "
                        "raise rollout.deadline_seconds or shorten the answers"
                    )
                positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
                out = module(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1)
                chosen, chosen_log_probs = sample(out.logits[:, -1], state, lengths)
                tokens.append(chosen)
                log_probs.append(chosen_log_probs)
                lengths += running
                stopped |= running & is_stop(chosen, state)
                running &= ~stopped & (lengths < state.limits)
                ids, mask = chosen[:, None], torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        columns = list(zip(*(step.tolist() for step in tokens), strict=True)) or [()] * len(requests)
        values = list(zip(*(step.tolist() for step in log_probs), strict=True)) or [()] * len(requests)
        ended = zip(columns, values, lengths.tolist(), stopped.tolist(), strict=True)
        return [
            Completion(ids_[:length], values_[:length], "stop" if stop else "length", self.version)
            for ids_, values_, length, stop in ended
        ]

    def _require_module(self) -> PreTrainedModel:
        if self._module is None:
            raise EngineError("the rollout engine has no weights yet: attach a module, or adopt one and load weights")
        return self._module


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
