# SPDX-License-Identifier: Apache-2.0
"""Which requests run: admission in order, one prefill for equal prompts, blocks reserved for the longest answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from whet.errors import EngineError
from whet.rollout.native.cache import BlockCache, blocks_for
from whet.rollout.native.paged_attention import BLOCK_SIZE
from whet.rollout.protocol import Request


@dataclass
class SharedPrompt:
    """A prompt, the requests that wait to answer it, and, once computed, its blocks and the logits after it."""

    token_ids: tuple[int, ...]
    waiting: deque[int]
    blocks: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None  # [V]

    @property
    def full_blocks(self) -> list[int]:
        """Blocks that its samples share; a last, partly filled one each sample copies and goes on to fill."""
        return self.blocks[: len(self.token_ids) // BLOCK_SIZE]

    @property
    def partial_block(self) -> list[int]:
        """The last, partly filled block, if there is one."""
        return self.blocks[len(self.token_ids) // BLOCK_SIZE :]


@dataclass(frozen=True)
class Admitted:
    """A request that starts to run and the blocks that it owns, in order."""

    index: int
    prompt: SharedPrompt
    blocks: list[int]


class Scheduler:
    """Hands out requests in order as slots and blocks allow. A request once admitted always runs to its end."""

    def __init__(self, requests: Sequence[Request], cache: BlockCache, max_batch_size: int) -> None:
        self.requests, self.cache, self.max_batch_size = requests, cache, max_batch_size
        self._prompts: deque[SharedPrompt] = deque()
        by_ids: dict[tuple[int, ...], SharedPrompt] = {}
        for index, request in enumerate(requests):
            self._check_fits(index, request)
            if request.token_ids not in by_ids:
                by_ids[request.token_ids] = SharedPrompt(request.token_ids, deque())
                self._prompts.append(by_ids[request.token_ids])
            by_ids[request.token_ids].waiting.append(index)

    @property
    def has_waiting(self) -> bool:
        """Whether a request has not started yet."""
        return bool(self._prompts)

    def admit(self, running: int) -> list[Admitted]:
        """The requests that start now, beside `running` others."""
        admitted: list[Admitted] = []
        while self._prompts and running + len(admitted) < self.max_batch_size:
            prompt = self._prompts[0]
            request = self.requests[prompt.waiting[0]]
            own = (
                blocks_for(len(prompt.token_ids) + request.params.max_new_tokens) - len(prompt.token_ids) // BLOCK_SIZE
            )
            first = 0 if prompt.blocks else blocks_for(len(prompt.token_ids))
            if own + first > self.cache.num_free:
                break
            if not prompt.blocks:
                prompt.blocks = self.cache.take(first)
            self.cache.share(prompt.full_blocks)
            admitted.append(Admitted(prompt.waiting.popleft(), prompt, prompt.full_blocks + self.cache.take(own)))
            if not prompt.waiting:
                self._prompts.popleft()
        return admitted

    def copy_partial_blocks(self, admitted: Sequence[Admitted]) -> None:
        """After the prefill: gives each admitted request its own copy of the prompt's last, partly filled block."""
        sources = [block for each in admitted for block in each.prompt.partial_block]
        targets = [each.blocks[len(each.prompt.full_blocks)] for each in admitted if each.prompt.partial_block]
        self.cache.copy(sources, targets)
        for prompt in {id(each.prompt): each.prompt for each in admitted}.values():
            if not prompt.waiting:
                self.cache.release(prompt.blocks)
                prompt.blocks = []

    def _check_fits(self, index: int, request: Request) -> None:
        tokens = len(request.token_ids) + request.params.max_new_tokens
        if not request.token_ids or request.params.max_new_tokens < 1:
            raise EngineError(
                f"request {index} has {len(request.token_ids)} prompt tokens and max_new_tokens="
                f"{request.params.max_new_tokens}; both must be at least 1"
            )
        if blocks_for(tokens) + 1 > self.cache.num_blocks:
            raise EngineError(
                f"request {index} may need {tokens} tokens, the KV cache holds "
                f"{(self.cache.num_blocks - 1) * BLOCK_SIZE}; "
                "raise rollout.kv_cache_bytes or lower data.max_response_length"
            )
