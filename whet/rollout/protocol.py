# SPDX-License-Identifier: Apache-2.0
"""The contract of rollout engines: they accept requests, return events, and load weights in between."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from whet.errors import DeadlineError, EngineError, WhetError
from whet.models.outputs import PromptLogProbs
from whet.models.positions import patches
from whet.phases import counted
from whet.types import Failure, FinishReason, Likeliest, Media, SamplingParams, Versions

Identity = tuple[int | str, ...]  # token ids of a prompt, with a media's digest instead of its first token
Weights = Iterable[tuple[str, torch.Tensor]]  # under their Hugging Face names


@dataclass(frozen=True)
class Span:
    """The part of a server that one of several nodes runs."""

    nodes: int
    number: int  # of the node; the server answers on node 0
    address: str  # of node 0, to which all parts connect
    port: int


@dataclass(frozen=True)
class Request:
    """A response to sample. Requests with equal `key` draw equal random numbers, whatever other requests run.

    `sampled_ids` are tokens of the response that an earlier attempt sampled. Draws, penalties, stops and
    `params.max_new_tokens` count from the start of the response, so the tokens are those of an undisturbed attempt."""

    uid: str  # unique among the requests of the engine
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    key: int  # from whet.keyed.key
    attempt: int = 0
    sampled_ids: tuple[int, ...] = ()
    media: tuple[Media, ...] = ()  # of the prompt
    opening: int | None = None  # number of prompt tokens before the first response in the prompt; unset: all
    deadline_seconds: float | None = None  # from submission; a request that takes longer fails
    keeps_cache: bool = False  # a request that begins with this prompt and its response may follow
    streams: bool = False  # new tokens come as Partial events while it runs, if the engine can; each token once

    @cached_property
    def identity(self) -> Identity:
        """Prompt token ids, with a digest for each media. Requests with equal beginnings share their computation.

        Raises: DataError where ids and media do not agree."""
        if not self.media:
            return self.prompt_ids
        ids: list[int | str] = list(self.prompt_ids)
        for each, places in zip(self.media, patches(self.prompt_ids, self.media), strict=True):
            ids[places[0]] = each.digest
        return tuple(ids)


@dataclass(frozen=True)
class Completion:
    """The tokens that one request sampled. They include the stop token, or all tokens of the stop string.

    The text of a response includes all its tokens (vLLM's include_stop_str_in_output): rewards and environments read
    the trained text, with the stop string and the rest of its last token."""

    token_ids: tuple[int, ...]
    # log_softmax(logits / temperature), temperature 1 when greedy, before anything else that changes the choice
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    versions: Versions  # the weights that sampled the tokens, stamped by the engine
    stop: str | None = None  # the stop string that ended it
    likeliest: tuple[Likeliest, ...] = ()  # most probable tokens at each position, if requested
    routed: tuple[bytes, ...] = ()  # experts at each position, if the engine reports them: see `Turn.routed`
    preemptions: int = field(default=0, compare=False)  # times it lost its cache to other requests

    def as_partial(self, uid: str, attempt: int, offset: int) -> Partial:
        """The completion's tokens as a Partial of a running request."""
        return Partial(uid, attempt, offset, self.token_ids, self.log_probs, self.versions, self.likeliest, self.routed)


@dataclass(frozen=True)
class Partial:
    """New tokens of a running request. `offset` is the position of the first one in the response."""

    uid: str
    attempt: int
    offset: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: Versions
    likeliest: tuple[Likeliest, ...] = ()
    routed: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The end of a request, including aborted ones."""

    uid: str
    attempt: int
    completion: Completion


@dataclass(frozen=True)
class Failed:
    """A request that failed in the engine."""

    uid: str
    attempt: int
    failure: Failure


Event = Partial | Finished | Failed


@dataclass(frozen=True)
class Lost:
    """The loss of a whole replica with all of its requests. The replica can be restarted."""

    why: str


@dataclass(frozen=True)
class Status:
    """The state of a rollout engine at one moment."""

    version: int  # of the weights
    running: int  # requests
    waiting: int  # requests
    oldest: str | None = None  # uid of the unfinished request that was submitted first
    oldest_seconds: float = 0.0  # since its submission


class RolloutEngine(Protocol):
    """A replica that samples from a policy. The trainer supplies the weights."""

    def submit(self, request: Request) -> bool:
        """Takes a request without waiting; False if the engine is full. A request with the uid and attempt of an
        unfinished one is ignored; a later attempt replaces an earlier one.

        Raises: EngineError for a request that can never fit."""
        ...

    def poll(self, timeout_seconds: float) -> list[Event]:
        """Waits up to `timeout_seconds` for events.  Returns all events since the last call.

        Raises: EngineError; WeightSyncError if the last weights did not arrive completely."""
        ...

    def abort(self, uids: Collection[str]) -> None:
        """Ends requests. Each returns Finished with finish_reason "abort" and the tokens so far."""
        ...

    def pause(self) -> None:
        """Stops sampling until `resume`. Each running request returns its tokens so far as Partial."""
        ...

    def resume(self) -> None:
        """Continues after `pause`."""
        ...

    def load(self, weights: Weights, version: int) -> None:
        """Copies weights into the engine's own module between two decode steps. Running requests continue with the new
        weights; cached keys and values are recomputed or, if the engine is configured so, kept.

        Raises: WeightSyncError for weights that do not fit; errors of `weights`. After an error nothing is sampled
        until all weights of a version have come."""
        ...

    def status(self) -> Status:
        """The version of the weights, and the numbers of running and waiting requests."""
        ...

    def close(self) -> None:
        """Frees all resources. Unfinished requests are lost."""
        ...


@runtime_checkable
class SharesModule(Protocol):
    """An engine that can sample with a module of this process."""

    def attach(self, module: PreTrainedModel, version: int, *, is_own: bool = False) -> None:
        """Samples from `module` itself, without a copy; its present weights count as `version`. With `is_own`, `load`
        may fill the module, and it leaves the device while the engine sleeps."""
        ...

    def adopt(self, module: PreTrainedModel) -> None:
        """Creates the engine's own module for `load`: like `module`, but without adapters, in the rollout dtype."""
        ...


@runtime_checkable
class LoadsAdapter(Protocol):
    """An engine that can sample with an adapter on fixed base weights."""

    takes_adapter: bool  # whether the engine was built to load adapters

    def load_adapter(self, weights: Weights, version: int) -> None:
        """Replaces the adapter between two decode steps; `weights` are named as in an adapter's folder; `model.lora`
        has the settings.

        Raises: the errors of `load`."""
        ...


@runtime_checkable
class TakesDelta(Protocol):
    """An engine that may receive weights as their changes since the last version."""

    takes_delta: bool


@runtime_checkable
class Sleeps(Protocol):
    """An engine that can free the device for training between rollouts."""

    def sleep(self) -> None:
        """Frees the device memory that only sampling needs: the key and value cache, and the engine's own module."""
        ...

    def wake(self) -> None:
        """Undoes `sleep`."""
        ...


@runtime_checkable
class TellsPrompts(Protocol):
    """An engine that can return log-probs of prompt tokens."""

    def prompt_log_probs(self, prompt: Sequence[int], count: int) -> PromptLogProbs:
        """Returns log-probs, at temperature 1, of all prompt tokens but the first; and the `count` most probable tokens
        at each position."""
        ...


@runtime_checkable
class Restarts(Protocol):
    """An engine that can start again after a LostReplicaError of `submit`, `poll` or `abort`.

    Until `restart` its other methods do nothing, except that `load` stores the weights."""

    def check(self, request: Request) -> None:
        """Raises: EngineError for a request that the engine can never sample, like `submit`."""
        ...

    def restart(self) -> None:
        """Starts the sampling process again, without requests. It may take minutes, and `load` may be called meanwhile.

        Raises: EngineError."""
        ...

    def rejoin(self) -> None:
        """Resumes sampling, with the newest loaded weights.  Raises: EngineError."""
        ...


POLL_SECONDS = 1.0


def generate(engine: RolloutEngine, requests: Sequence[Request], deadline_seconds: float = 3600.0) -> list[Completion]:
    """Samples all requests. Returns their completions in the same order.

    Raises: DeadlineError; EngineError for a failed request and for equal uids; errors of the engine."""
    if len(uids := Counter(request.uid for request in requests)) < len(requests):
        [(uid, count)] = uids.most_common(1)
        raise EngineError(f"request {uid}", f"is one of {count} with this uid", "a different uid for each request")
    waiting, done, deadline = deque(requests), dict[str, Completion](), time.monotonic() + deadline_seconds
    try:
        while len(done) < len(requests):
            while waiting and engine.submit(waiting[0]):
                waiting.popleft()
            for event in engine.poll(POLL_SECONDS):
                if isinstance(event, Finished):
                    done[event.uid] = event.completion
                elif isinstance(event, Failed):
                    raise EngineError(f"request {event.uid}", f"failed: {event.failure.message}", "a completion")
            counted(len(done), len(requests))
            if time.monotonic() > deadline:
                raise late(engine, deadline_seconds, len(requests) - len(done), len(requests))
    except BaseException:
        drop(engine, [request.uid for request in requests])
        raise
    return [done[request.uid] for request in requests]


def drop(engine: RolloutEngine, uids: Collection[str]) -> None:
    """Aborts requests after an error, because nobody will read their completions."""
    with suppress(WhetError):  # the engine itself may have failed
        engine.abort(uids)
        engine.poll(0.0)


def late(engine: RolloutEngine, deadline_seconds: float, unfinished: int, total: int) -> DeadlineError:
    """Returns the error for a rollout that did not finish in time."""
    status = engine.status()
    found = f"waited {deadline_seconds:g} s for {unfinished} of {total} responses ({status.running} running, "
    found += f"{status.waiting} waiting, the oldest {status.oldest})"
    change = "raise rollout.deadline_seconds or shorten the responses with data.max_response_length"
    return DeadlineError("rollout", found, "", change)
