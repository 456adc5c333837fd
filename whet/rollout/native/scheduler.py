# SPDX-License-Identifier: Apache-2.0
"""Which requests run: admission in order, one prefill for equal prompts, blocks as answers grow.

No room is reserved for the longest answer. Where blocks run out the newest answers give theirs up, keep their tokens,
and are computed again (as vLLM's recompute preemption): first in, first out, so that the oldest always goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from whet.errors import EngineError
from whet.rollout.native.cache import BlockCache, blocks_for
from whet.rollout.native.paged_attention import BLOCK_SIZE
from whet.rollout.protocol import Request

# An answer starts, or goes on, only where every running one finds so many blocks more, up to those that its longest
# answer takes: without any, what was just computed is thrown away again; with all, the worst case is reserved.
HEADROOM_BLOCKS = 1


@dataclass(eq=False)
class SharedPrompt:
    """A prompt, the requests that answer it, and, while it is computed, its blocks and the logits after it.

    It owns its blocks until its last answer is done, or until they are needed while none of its answers runs."""

    token_ids: tuple[int, ...]
    waiting: deque[int] = field(default_factory=deque)  # have not started
    unfinished: int = 0
    running: int = 0
    blocks: list[int] = field(default_factory=list)
    uncomputed: tuple[int, ...] = ()  # the tokens that the blocks are still to be filled with
    logits: torch.Tensor | None = None  # [V]

    @property
    def num_full(self) -> int:
        """Blocks that its answers share; a last, partly filled one each answer copies and goes on to fill."""
        return len(self.token_ids) // BLOCK_SIZE

    @property
    def full_blocks(self) -> list[int]:
        """The shared ones."""
        return self.blocks[: self.num_full]

    @property
    def partial_block(self) -> list[int]:
        """The last, partly filled one, while there are answers to start from it."""
        return self.blocks[self.num_full :]

    @property
    def tokens_to_compute(self) -> tuple[int, ...]:
        """All of it where answers start from it, else what answers that go on can share."""
        return self.token_ids if self.waiting else self.token_ids[: self.num_full * BLOCK_SIZE]


@dataclass(eq=False)
class Answer:
    """A request that runs, or was preempted: the blocks that it owns, in order, and what it had sampled by then."""

    index: int
    prompt: SharedPrompt
    most_blocks: int
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    preemptions: int = 0

    @property
    def cached_ids(self) -> tuple[int, ...]:
        """The tokens whose keys and values it needs before it goes on: all but the last, which is fed next."""
        return (*self.prompt.token_ids, *self.tokens[:-1])

    @property
    def headroom(self) -> int:
        """Blocks to leave for it."""
        return min(HEADROOM_BLOCKS, self.most_blocks - len(self.blocks))


class Scheduler:
    """Hands out requests in order as rows and blocks allow, and takes blocks back where they are short."""

    def __init__(self, requests: Sequence[Request], cache: BlockCache, max_batch_size: int) -> None:
        self.requests, self.cache, self.max_batch_size = requests, cache, max_batch_size
        self.running: dict[int, Answer] = {}  # by request, the oldest first
        self._preempted: deque[Answer] = deque()  # the oldest first; all are newer than those running
        self._prompts: list[SharedPrompt] = []
        self._unstarted: deque[SharedPrompt] = deque()
        self.num_unfinished = 0  # of those that were added
        for index, request in enumerate(requests):
            self._check_fits(index, request)

    def add(self, indices: Iterable[int]) -> None:
        """Puts requests at the end of the queue; those of an equal prompt that waits there join it."""
        waiting = {prompt.token_ids: prompt for prompt in self._unstarted}
        for index in indices:
            token_ids = self.requests[index].token_ids
            if token_ids not in waiting:
                waiting[token_ids] = SharedPrompt(token_ids)
                self._prompts.append(waiting[token_ids])
                self._unstarted.append(waiting[token_ids])
            waiting[token_ids].waiting.append(index)
            waiting[token_ids].unfinished += 1
            self.num_unfinished += 1

    def admit(self) -> list[Answer]:
        """The answers that start or go on now, those that go on first."""
        admitted: list[Answer] = []
        while len(self.running) < self.max_batch_size and (answer := self._next()) is not None:
            prompt = answer.prompt
            first = 0 if prompt.blocks else blocks_for(len(prompt.tokens_to_compute))
            length = len(answer.cached_ids) if answer.tokens else len(prompt.token_ids)
            own = blocks_for(length) - prompt.num_full
            headroom = sum(each.headroom for each in self.running.values())
            headroom += min(HEADROOM_BLOCKS, answer.most_blocks - blocks_for(length))
            if not self.running:
                self._free_idle_prompts(first + own, but=prompt)
            elif first + own + headroom > self.cache.num_free:
                break
            if not prompt.blocks:
                prompt.blocks, prompt.uncomputed = self.cache.take(first), prompt.tokens_to_compute
            self.cache.share(prompt.full_blocks)
            answer.blocks = prompt.full_blocks + self.cache.take(own)
            self._start(answer)
            admitted.append(answer)
        return admitted

    def grow(self, indices: Iterable[int]) -> tuple[dict[int, int], list[Answer]]:
        """A block more for each of these running requests, or none and its place in the queue.

        Returns the blocks by request, and the answers that were preempted."""
        wanting, blocks, preempted = set(indices), dict[int, int](), list[Answer]()
        for index in [each for each in self.running if each in wanting]:  # the oldest first
            while index in self.running and not self.cache.num_free:
                if not self._free_idle_prompts(1):
                    preempted.append(self._preempt())
            if index in self.running:
                [block] = self.cache.take(1)
                self.running[index].blocks.append(block)
                blocks[index] = block
        return {index: block for index, block in blocks.items() if index in self.running}, preempted

    def finish(self, index: int) -> Answer:
        """Takes back what a request that is done owned."""
        answer = self.running.pop(index)
        answer.prompt.running -= 1
        answer.prompt.unfinished -= 1
        self.num_unfinished -= 1
        self.cache.release(answer.blocks)
        if not answer.prompt.unfinished:
            self._release(answer.prompt)
        return answer

    def copy_partial_blocks(self, started: Sequence[Answer]) -> None:
        """After the prefill: gives each new answer its own copy of its prompt's last, partly filled block."""
        sources = [block for each in started for block in each.prompt.partial_block]
        targets = [each.blocks[each.prompt.num_full] for each in started if each.prompt.partial_block]
        self.cache.copy(sources, targets)
        for prompt in {id(each.prompt): each.prompt for each in started}.values():
            if not prompt.waiting:
                self.cache.release(prompt.partial_block)
                prompt.blocks, prompt.logits = prompt.full_blocks, None

    def _next(self) -> Answer | None:
        """Who is next in the queue."""
        if self._preempted:
            return self._preempted[0]
        if not self._unstarted:
            return None
        prompt = self._unstarted[0]
        index = prompt.waiting[0]
        return Answer(index, prompt, blocks_for(len(prompt.token_ids) + self.requests[index].params.max_new_tokens))

    def _start(self, answer: Answer) -> None:
        """Takes an answer out of the queue."""
        self.running[answer.index] = answer
        answer.prompt.running += 1
        if answer.tokens:
            self._preempted.popleft()
            return
        answer.prompt.waiting.popleft()
        if not answer.prompt.waiting:
            self._unstarted.popleft()

    def _preempt(self) -> Answer:
        """Takes everything from the newest running answer."""
        _, answer = self.running.popitem()
        answer.prompt.running -= 1
        answer.preemptions += 1
        self.cache.release(answer.blocks)
        answer.blocks = []
        self._preempted.appendleft(answer)
        return answer

    def _free_idle_prompts(self, count: int, but: SharedPrompt | None = None) -> bool:
        """Takes blocks from prompts of which no answer runs until `count` are free; whether they are."""
        for prompt in self._prompts:
            if self.cache.num_free >= count:
                break
            if prompt.blocks and not prompt.running and prompt is not but:
                self._release(prompt)
        return self.cache.num_free >= count

    def _release(self, prompt: SharedPrompt) -> None:
        self.cache.release(prompt.blocks)
        prompt.blocks, prompt.logits = [], None

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
