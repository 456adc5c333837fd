# SPDX-License-Identifier: Apache-2.0
"""Base of rollout engines that compute in this process. It handles requests, events and weights; a subclass samples."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from whet.errors import EngineError
from whet.models.encoders.base import Encoders
from whet.models.encoders.load import encoders_of
from whet.models.load import cast_weights, fitting, stored_tensors
from whet.models.lora import plain_copy
from whet.models.outputs import ForwardSettings, PromptLogProbs, prompt_log_probs
from whet.models.supported import support_of
from whet.phases import span
from whet.rollout.ledger import Ledger, check_request, check_whole, too_late
from whet.rollout.protocol import Completion, Event, Finished, Likeliest, Partial, Request, Status, Weights
from whet.rollout.stop_strings import LastStops, LoadTokenizer as LoadTokenizer, StopStrings
from whet.types import FinishReason, Versions, last_versions


@dataclass(eq=False)
class LiveRequest:
    """An unfinished request. While it is sampled, only the engine has its newest tokens, until they are read."""

    request: Request
    tokens: list[int]  # of the response
    log_probs: list[float]  # of `tokens`; 0 for tokens of earlier attempts
    submitted_at: float = field(default_factory=time.monotonic)
    versions: Versions = ()  # of the tokens up to the last change of weights
    preemptions: int = 0
    num_streamed: int = 0  # tokens of the response that were given as Partial
    likeliest: list[Likeliest] = field(default_factory=list)  # most probable tokens of this attempt, if requested
    routed: list[bytes] = field(default_factory=list)  # experts of this attempt, if the engine reports them

    @property
    def late_at(self) -> float:
        """The value of time.monotonic() at which the request fails."""
        seconds = self.request.deadline_seconds
        return float("inf") if seconds is None else self.submitted_at + seconds

    def stamp(self, version: int) -> None:
        """Stamps the unstamped tokens with `version`."""
        new = len(self.tokens) - len(self.request.sampled_ids) - sum(count for _, count in self.versions)
        if new and self.versions and self.versions[-1][0] == version:
            self.versions = (*self.versions[:-1], (version, self.versions[-1][1] + new))
        elif new:
            self.versions = (*self.versions, (version, new))

    def completion(self, version: int, reason: FinishReason, stop: str | None = None) -> Completion:
        """Returns the completion of the request, as if it ended now. Its newest tokens are stamped with `version`."""
        self.stamp(version)
        new = slice(len(self.request.sampled_ids), None)
        tokens, log_probs = tuple(self.tokens[new]), tuple(self.log_probs[new])
        told = tuple(self.likeliest[: len(tokens)]), tuple(self.routed[: len(tokens)])
        return Completion(tokens, log_probs, reason, self.versions, stop, *told, self.preemptions)

    def partial(self, version: int) -> Partial:
        """Returns the tokens that no earlier Partial has. The newest tokens are stamped with `version`."""
        self.stamp(version)
        first, self.num_streamed = self.num_streamed, len(self.tokens)
        tokens, log_probs = tuple(self.tokens[first:]), tuple(self.log_probs[first:])
        versions, known = last_versions(self.versions, len(tokens)), first - len(self.request.sampled_ids)
        here = slice(known, known + len(tokens))
        told = tuple(self.likeliest[here]), tuple(self.routed[here])
        return Partial(self.request.uid, self.request.attempt, first, tokens, log_probs, versions, *told)

    def tell(self, likeliest: Likeliest) -> None:
        """Stores the most probable tokens at the position that was just sampled."""
        if count := self.request.params.num_likeliest:
            self.likeliest.append(likeliest[:count])


L = TypeVar("L", bound=LiveRequest)
Done = tuple[L, FinishReason, str | None]  # a request that ended, why, and at which stop string


class Policy:
    """The module to sample from: none yet, a shared one, or the engine's own, which it may fill and offload."""

    def __init__(self) -> None:
        self.module: PreTrainedModel | None = None
        self.version = -1
        self._is_own = False
        self._coming: int | None = None  # the version that is being loaded, or whose load failed
        self._device: torch.device | None = None  # the module's device, while the module is on the host

    def set(self, module: PreTrainedModel, version: int, *, is_own: bool) -> None:
        """Makes `module` the module to sample from."""
        self.module, self.version, self._is_own = module, version, is_own
        self._coming = self._device = None

    def fill(self, weights: Weights, version: int) -> None:
        """Copies all weights into the module.  Raises: WeightSyncError; errors of `weights`."""
        module = self.require()
        self._coming = version
        _fill(module, weights)
        self.version, self._coming = version, None

    def require(self) -> PreTrainedModel:
        """Returns the module.  Raises: EngineError if there is none."""
        if self.module is None:
            raise EngineError("module of the rollout", None, change="attach a module, or adopt one and load weights")
        return self.module

    def require_whole(self) -> PreTrainedModel:
        """Returns the module for sampling.  Raises: EngineError without one; WeightSyncError for mixed versions."""
        check_whole(self._coming, self.version)
        return self.require()

    def leave_device(self) -> None:
        """Moves the engine's own module to the host."""
        if self._is_own and self._device is None:
            self._device = self.require().device
            nn.Module.to(self.require(), "cpu")

    def return_to_device(self) -> None:
        """Undoes `leave_device`."""
        if self._device is not None:
            nn.Module.to(self.require(), self._device)
            self._device = None


class InProcessEngine(ABC, Generic[L]):
    """Base of engines that decode while the caller polls. With `keep_cache`, running requests keep their keys and
    values when weights change. Otherwise these are recomputed, so that each log-prob belongs to exactly one version."""

    def __init__(
        self, dtype: torch.dtype, max_batch_size: int, load_tokenizer: LoadTokenizer | None, keep_cache: bool
    ) -> None:
        self.dtype, self.max_batch_size, self.keep_cache = dtype, max_batch_size, keep_cache
        self.load_tokenizer = load_tokenizer  # called only for requests with stop strings
        self.policy, self.vocab_size = Policy(), 0
        self.unfinished = Ledger[L]()
        self._streaming: dict[str, L] = {}  # unfinished requests that stream their tokens
        self._restore = ExitStack()  # undoes changes of the module by sampling, once no request runs
        self._events: list[Event] = []
        self._stops = LastStops()
        self._paused = False
        self._first_late_at = float("inf")

    def submit(self, request: Request) -> bool:
        """Accepts a request; False if MAX_UNFINISHED are unfinished.  Raises: EngineError if it can never fit."""
        if (answer := self.unfinished.answer(request)) is not None:
            return answer
        self._end([self.unfinished[request.uid]] if request.uid in self.unfinished else [])
        if request.media:
            self._readable(request).prefetch(request.media, self.policy.require())
        self.policy.require()
        check_request(request, self.vocab_size)
        self.stops_of(request)
        self.unfinished[request.uid] = live = self._take(request)
        if request.streams:
            self._streaming[request.uid], live.num_streamed = live, len(request.sampled_ids)
        self._first_late_at = min(self._first_late_at, live.late_at)
        return True

    def _readable(self, request: Request) -> Encoders:
        """Returns the model's encoders.  Raises: EngineError if they cannot read a media of the request."""
        encoders = encoders_of(self.policy.require())
        for each in request.media:
            if encoders is None or each.kind not in encoders.kinds or each.tokens is None:
                kinds = () if encoders is None else sorted(encoders.kinds)
                reads = ", ".join(["text", *(f"{kind}s" for kind in kinds)])
                raise EngineError(f"request {request.uid}", f"has {each.kind}s", f"{reads}, which the model reads")
        assert encoders is not None
        return encoders

    @torch.no_grad()
    def poll(self, timeout_seconds: float) -> list[Event]:
        """Decodes until there is an event, for at most `timeout_seconds`.  Raises: EngineError, WeightSyncError."""
        until = time.monotonic() + timeout_seconds
        if time.monotonic() >= self._first_late_at:
            self._fail_late_requests()
        while self.unfinished and not self._paused and not self._events:
            module = self.policy.require_whole()
            if module.training:
                module.eval()
                self._restore.callback(module.train)
            with span("rollout step"):
                done = self._step(module)
            for live, reason, stop in done:
                completion = live.completion(self.policy.version, reason, stop)
                self._events.append(Finished(live.request.uid, live.request.attempt, completion))
                del self.unfinished[live.request.uid]
                self._streaming.pop(live.request.uid, None)
            if self._streaming:
                self._read_streaming(list(self._streaming.values()))
                self._give_new_tokens()
            if time.monotonic() >= until:
                break
        if not self.unfinished:
            self._restore.close()
        events, self._events = self._events, []
        return events

    def abort(self, uids: Collection[str]) -> None:
        live = [self.unfinished[uid] for uid in uids if uid in self.unfinished]
        self._end(live)
        for each in live:
            completion = each.completion(self.policy.version, "abort")
            self._events.append(Finished(each.request.uid, each.request.attempt, completion))

    def pause(self) -> None:
        self._paused = True
        self._read()
        self._give_new_tokens()
        for each in self.unfinished.values():
            if each.request.streams:
                continue
            request, so_far = each.request, each.completion(self.policy.version, "abort")
            if so_far.token_ids:
                where = request.uid, request.attempt, len(request.sampled_ids)
                self._events.append(so_far.as_partial(*where))
        self._restore.close()

    def resume(self) -> None:
        self._paused = False

    def attach(self, module: PreTrainedModel, version: int, *, is_own: bool = False) -> None:
        is_other = module is not self.policy.module
        self._before_new_weights(forget=is_other or not self.keep_cache)
        if is_other:
            self.vocab_size = module.config.get_text_config().vocab_size
            self._use(module)
        self.policy.set(module, version, is_own=is_own)

    def adopt(self, module: PreTrainedModel) -> None:
        own = plain_copy(module).requires_grad_(False)
        cast_weights(own, self.dtype)
        self.attach(own, self.policy.version, is_own=True)

    def load(self, weights: Weights, version: int) -> None:
        """Copies weights into the engine's own module.  Raises: WeightSyncError; errors of `weights`."""
        self._before_new_weights(forget=not self.keep_cache)
        self.policy.fill(weights, version)

    def prompt_log_probs(self, prompt: Sequence[int], count: int) -> PromptLogProbs:
        """Returns log-probs of all prompt tokens but the first, and `count` most probable tokens at each position."""
        module = self.policy.require_whole()
        settings = ForwardSettings(packing=support_of(module).is_own, dtype=self.dtype)
        return prompt_log_probs(module, prompt, count, settings)

    def sleep(self) -> None:
        """Frees the cache, and moves the engine's own module off the device."""
        self._read()
        self._forget()
        self._restore.close()
        self.policy.leave_device()

    def wake(self) -> None:
        """Moves the engine's own module back to the device. The cache is rebuilt when it is needed."""
        self.policy.return_to_device()

    def status(self) -> Status:
        return self.unfinished.status(self.policy.version, self._num_running)

    def close(self) -> None:
        """Drops all requests and frees the memory that `sleep` frees."""
        self._end(list(self.unfinished.values()))
        self.sleep()

    def stops_of(self, request: Request) -> StopStrings | None:
        """Returns the stop strings of a request.  Raises: EngineError if it has some and there is no tokenizer."""
        strings = request.params.stop
        if not strings:
            return None
        if self.load_tokenizer is None:
            raise EngineError("stop strings of a request", strings, "none for a rollout engine without a tokenizer")
        return self._stops.of(strings, self.load_tokenizer)

    @property
    @abstractmethod
    def _num_running(self) -> int:
        """The number of requests that are being sampled."""

    @abstractmethod
    def _use(self, module: PreTrainedModel) -> None:
        """Prepares to sample from `module`.  Raises: EngineError if the engine does not support the module."""

    @abstractmethod
    def _take(self, request: Request) -> L:
        """Puts a request at the end of the queue.  Raises: EngineError for a request that can never fit."""

    @abstractmethod
    def _step(self, module: PreTrainedModel) -> list[Done[L]]:
        """Samples a token for every running request.  Returns the finished requests, with all their tokens."""

    @abstractmethod
    def _read(self) -> None:
        """Copies the tokens and log-probs sampled so far into every running request."""

    def _read_streaming(self, live: Sequence[L]) -> None:
        """Copies the tokens and log-probs sampled so far into at least these requests. Some of them may be waiting."""
        self._read()

    @abstractmethod
    def _drop(self, live: Sequence[L]) -> None:
        """Removes requests, running or waiting. The caller has called `_read` before."""

    @abstractmethod
    def _forget(self) -> None:
        """Puts running requests back into the queue, and drops their cache. The caller has called `_read` before."""

    def _forget_finished(self) -> None:
        """Frees the cached blocks of finished requests."""

    def _end(self, live: Sequence[L]) -> None:
        if not live:
            return
        self._read()
        self._drop(live)
        for each in live:
            del self.unfinished[each.request.uid]
            self._streaming.pop(each.request.uid, None)
        if not self.unfinished:
            self._restore.close()

    def _give_new_tokens(self) -> None:
        """Adds a Partial for each streaming request that has unsent tokens."""
        for each in self._streaming.values():
            if len(each.tokens) > each.num_streamed:
                self._events.append(each.partial(self.policy.version))

    def _before_new_weights(self, *, forget: bool) -> None:
        """Stamps the tokens so far with the version that sampled them. With `forget` drops the cache."""
        self._forget_finished()
        if not self.unfinished:
            return
        self._read()
        for each in self.unfinished.values():
            each.stamp(self.policy.version)
        if forget:
            self._forget()

    def _fail_late_requests(self) -> None:
        now = time.monotonic()
        late = [each for each in self.unfinished.values() if now >= each.late_at]
        self._end(late)
        self._first_late_at = min((each.late_at for each in self.unfinished.values()), default=float("inf"))
        self._events += [too_late(each.request, f" after {len(each.tokens)} tokens") for each in late]


@torch.no_grad()
def _fill(module: nn.Module, weights: Weights) -> None:
    own = stored_tensors(module)
    for name, weight in fitting(weights, module):
        own[name].copy_(weight)
