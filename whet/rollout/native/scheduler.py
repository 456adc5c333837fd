# SPDX-License-Identifier: Apache-2.0
"""Scheduling of requests: admission in order, one prefill for equal prompts, blocks as responses grow.

No room is reserved for the longest response. If blocks run out, the newest requests lose their blocks, keep their
tokens, and are computed again later, as in vLLM's recompute preemption. The oldest request always continues."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from whet.kernels.paged_attention import BLOCK_SIZE
from whet.models.positions import next_position, patches, rotary_positions
from whet.rollout.in_process import LiveRequest
from whet.rollout.ledger import too_long
from whet.rollout.native.cache import BlockCache, Prefixes, blocks_for
from whet.rollout.native.states import End
from whet.rollout.protocol import Identity, Request
from whet.types import Media

# A request starts or resumes only if each running request could take so many more blocks (at most the blocks of its
# longest response). With 0, new requests are soon preempted; with all blocks, the worst case is reserved.
HEADROOM_BLOCKS = 1
PREFILL_TOKENS = 4096  # of prompts that are computed together


@dataclass(eq=False)
class SharedPrompt:
    """A prompt with its requests and, while it is cached, its blocks and the logits after it.

    It owns its blocks until its last request is done. While none of its requests runs, the blocks may be taken away."""

    request: Request  # any of its requests
    waiting: deque[ScheduledRequest] = field(default_factory=deque)  # requests that have not started
    unfinished: int = 0
    running: int = 0
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens at its start that were computed for another request
    uncomputed: tuple[int, ...] = ()  # tokens after these that are not in the blocks yet
    logits: torch.Tensor | None = None  # [V]
    routed: bytes = b""  # experts of the pass that gave the logits, with the option routed_experts
    end: End | None = None  # the states after it, where layers have some

    def __post_init__(self) -> None:
        self.token_ids, self.identity = self.request.prompt_ids, self.request.identity
        # On three axes: a token at place t behind the prompt has the position t + shift.
        self.rotary = rotary_positions(self.token_ids, self.request.media, self.request.opening)
        self.shift = 0 if self.rotary is None else next_position(self.rotary) - len(self.token_ids)
        # Its requests share full blocks; each request copies the last, partly filled block and fills its copy.
        self.num_full = len(self.token_ids) // BLOCK_SIZE

    @property
    def full_blocks(self) -> list[int]:
        """The full blocks. All requests of the prompt share them."""
        return self.blocks[: self.num_full]

    @property
    def partial_block(self) -> list[int]:
        """The last block, if it is partly filled and requests can still start from it."""
        return self.blocks[self.num_full :]


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one sequence that are to be computed."""

    token_ids: Sequence[int]
    start: int  # position of the first token
    blocks: list[int]  # of the sequence
    prompt: SharedPrompt  # the prompt at the start of the sequence
    is_last: bool = True  # whether no part of a longer stretch follows
    end: End | None = None  # the states before its first token, where there are some

    @property
    def rotary(self) -> torch.Tensor:
        """The rotary positions of the tokens, [3, n]."""
        end, known = self.start + len(self.token_ids), self.prompt.rotary
        places = torch.arange(self.start, end).expand(3, -1)
        if known is None:
            return places
        inside = known[:, self.start : end]
        return torch.cat([inside, places[:, inside.shape[1] :] + self.prompt.shift], 1)

    @property
    def media(self) -> Iterator[tuple[Media, slice]]:
        """Yields the media that have patches among the tokens, with the range of these patches."""
        end, media = self.start + len(self.token_ids), self.prompt.request.media
        for each, places in zip(media, patches(self.prompt.token_ids, media), strict=True):
            first, last = bisect_left(places, self.start), bisect_left(places, end)
            if first < last:
                yield each, slice(first, last)


@dataclass(eq=False, kw_only=True)
class ScheduledRequest(LiveRequest):
    """An unfinished request with its blocks, in order."""

    prompt: SharedPrompt
    most_blocks: int  # of its prompt and its longest response
    blocks: list[int] = field(default_factory=list)

    @property
    def cached_ids(self) -> tuple[int, ...]:
        """The tokens whose keys and values the request needs: all but the last, which is fed next."""
        return (*self.prompt.token_ids, *self.tokens[:-1])


class Scheduler:
    """Admits requests in order as rows and blocks allow, and takes blocks back when they run out."""

    def __init__(self, cache: BlockCache, prefixes: Prefixes, max_batch_size: int) -> None:
        self.cache, self.prefixes, self.max_batch_size = cache, prefixes, max_batch_size
        self.running: dict[str, ScheduledRequest] = {}  # by uid, the oldest first
        self._begun: deque[ScheduledRequest] = deque()  # with tokens, but not running; the oldest first
        self._prompts: dict[SharedPrompt, None] = {}  # the oldest first
        self._newest: dict[Identity, SharedPrompt] = {}  # the newest SharedPrompt of each prompt
        self._unstarted: deque[SharedPrompt] = deque()

    def add(self, request: Request) -> ScheduledRequest:
        """Puts a request into the queue: next to requests with an equal prompt, else at the end.  Raises: EngineError
        for a request that the cache cannot hold."""
        most_blocks = blocks_for(len(request.prompt_ids) + request.params.max_new_tokens)
        if most_blocks + 1 > self.cache.num_blocks:
            most = f"{(self.cache.num_blocks - 1) * BLOCK_SIZE}, the size of the KV cache"
            raise too_long(request, most, "kv_cache_bytes")
        prompt, earlier = self._prompt_for(request), list(request.sampled_ids)
        live = ScheduledRequest(request, earlier, [0.0] * len(earlier), prompt=prompt, most_blocks=most_blocks)
        prompt.unfinished += 1
        if live.tokens:
            self._begun.append(live)
            return live
        if not prompt.waiting:
            self._unstarted.append(prompt)
        prompt.waiting.append(live)
        return live

    def admit(self) -> list[ScheduledRequest]:
        """Admits requests that have tokens (preempted or resumed), then new ones.  Returns them."""
        admitted: list[ScheduledRequest] = []
        headroom = sum(min(HEADROOM_BLOCKS, each.most_blocks - len(each.blocks)) for each in self.running.values())
        while len(self.running) < self.max_batch_size and (self._begun or self._unstarted):
            live = self._begun[0] if self._begun else self._unstarted[0].waiting[0]
            prompt = live.prompt
            # The whole prompt is computed if a request has not started, or if layers have states, from which every
            # request continues; else only its full, shared blocks.
            computed = prompt.token_ids
            if not prompt.waiting and self.cache.states is None:
                computed = computed[: prompt.num_full * BLOCK_SIZE]
            found, num_found = ([], 0) if prompt.blocks else self.prefixes.kept_part(prompt.identity[: len(computed)])
            first = 0 if prompt.blocks else blocks_for(len(computed)) - len(found)
            length = len(live.cached_ids) if live.tokens else len(prompt.token_ids)
            own = blocks_for(length) - prompt.num_full
            headroom += min(HEADROOM_BLOCKS, live.most_blocks - blocks_for(length))
            self.prefixes.free(first + own + headroom)
            if not self.running:
                self._free_idle_prompts(first + own, but=prompt)
            elif first + own + headroom > self.cache.num_free:
                self.cache.release(found)
                break
            if not prompt.blocks:
                prompt.blocks, prompt.num_computed = found + self.cache.take(first), num_found
                prompt.uncomputed = computed[num_found:]
                if live.request.keeps_cache:  # for later prompts that begin with it, also in the same prefill
                    self.prefixes.keep(prompt.identity[: prompt.num_full * BLOCK_SIZE], prompt.full_blocks)
            self.cache.add_owner(prompt.full_blocks)
            live.blocks = prompt.full_blocks + self.cache.take(own)
            self.running[live.request.uid] = live
            prompt.running += 1
            if live.tokens:
                self._begun.popleft()
            else:
                self._leave_queue(live)
            admitted.append(live)
        return admitted

    def grow(self, wanting: Iterable[ScheduledRequest]) -> tuple[dict[ScheduledRequest, int], list[ScheduledRequest]]:
        """Gives each of these running requests one more block, or else preempts it: takes its blocks, puts it back into
        the queue. Returns the new blocks, and the preempted requests."""
        growing, blocks, preempted = set(wanting), dict[ScheduledRequest, int](), list[ScheduledRequest]()
        for live in [each for each in self.running.values() if each in growing]:  # the oldest first
            self.prefixes.free(1)
            while live.request.uid in self.running and not self.cache.num_free:
                if not self._free_idle_prompts(1):
                    preempted.append(self._preempt())
            if live.request.uid in self.running:
                [block] = self.cache.take(1)
                live.blocks.append(block)
                blocks[live] = block
        return {live: block for live, block in blocks.items() if live not in preempted}, preempted

    def remove(self, live: ScheduledRequest, *, keeps_cache: bool = False) -> None:
        """Removes an unfinished request, running or not, and frees its blocks. With `keeps_cache`, blocks of a running
        request whose tokens have been read are kept for requests that continue it."""
        uid, prompt = live.request.uid, live.prompt
        if self.running.pop(uid, None) is not None:
            prompt.running -= 1
            if keeps_cache:
                self.prefixes.keep((*live.prompt.identity, *live.tokens[:-1]), live.blocks)
            self.cache.release(live.blocks)
        elif live.tokens:
            self._begun.remove(live)
        else:
            self._leave_queue(live)
        prompt.unfinished -= 1
        if not prompt.unfinished:
            self._release(prompt)
            del self._prompts[prompt]
            if self._newest.get(prompt.identity) is prompt:
                del self._newest[prompt.identity]

    def forget(self) -> None:
        """Frees all blocks and puts running requests back into the queue, to be computed again."""
        while self.running:
            self._preempt().preemptions -= 1  # not for lack of memory
        for prompt in self._prompts:
            self._release(prompt)

    def copy_partial_blocks(self, started: Sequence[ScheduledRequest]) -> None:
        """Gives each new request its own copy of its prompt's last, partly filled block, after the prefill."""
        sources = [block for each in started for block in each.prompt.partial_block]
        targets = [each.blocks[each.prompt.num_full] for each in started if each.prompt.partial_block]
        self.cache.copy(sources, targets)
        for prompt in dict.fromkeys(each.prompt for each in started):
            if not prompt.waiting and prompt.end is None:
                self.cache.release(prompt.partial_block)
                prompt.blocks, prompt.logits = prompt.full_blocks, None

    def _prompt_for(self, request: Request) -> SharedPrompt:
        """Returns the prompt of an equal waiting request, or a new one. Resumed requests share any equal prompt."""
        prompt = self._newest.get(request.identity)
        if prompt is None or not (prompt.waiting or request.sampled_ids):
            prompt = self._newest[request.identity] = SharedPrompt(request)
            self._prompts[prompt] = None
        return prompt

    def _leave_queue(self, live: ScheduledRequest) -> None:
        """Removes a request that has not started from the queue."""
        live.prompt.waiting.remove(live)
        if not live.prompt.waiting:
            self._unstarted.remove(live.prompt)

    def _preempt(self) -> ScheduledRequest:
        """Takes all blocks from the newest running request."""
        _, live = self.running.popitem()
        live.prompt.running -= 1
        live.preemptions += 1
        self.cache.release(live.blocks)
        live.blocks = []
        self._begun.appendleft(live)
        return live

    def _free_idle_prompts(self, count: int, but: SharedPrompt | None = None) -> bool:
        """Takes blocks from prompts without a running request until `count` are free.  Returns True on success."""
        for prompt in self._prompts:
            if self.cache.num_free >= count:
                break
            if prompt.blocks and not prompt.running and prompt is not but:
                self._release(prompt)
        return self.cache.num_free >= count

    def _release(self, prompt: SharedPrompt) -> None:
        self.cache.release(prompt.blocks)
        prompt.blocks, prompt.logits, prompt.end = [], None, None


def by_tokens(stretches: Sequence[Stretch], most: float = math.inf) -> Iterator[list[Stretch]]:
    """Yields batches of at most `most` stretches. A batch has at most PREFILL_TOKENS tokens, or one longer stretch."""
    batch, tokens = list[Stretch](), 0
    for stretch in stretches:
        tokens += len(stretch.token_ids)
        if batch and (tokens > PREFILL_TOKENS or len(batch) == most):
            yield batch
            batch, tokens = [], len(stretch.token_ids)
        batch.append(stretch)
    if batch:
        yield batch
