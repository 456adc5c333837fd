# SPDX-License-Identifier: Apache-2.0
"""The contract of rollout engines: a stream of requests goes in, events come out, weights change in between."""

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
from whet.types import Failure, FinishReason, Media, Versions

Identity = tuple[int | str, ...]  # of a prompt: its token ids, and digests in the place of each media's first token
Likeliest = tuple[tuple[int, float], ...]  # tokens with their log-probs, the likeliest first
Weights = Iterable[tuple[str, torch.Tensor]]  # under their Hugging Face names


@dataclass(frozen=True)
class Span:
    """The part of a server that one of several nodes has."""

    nodes: int
    number: int  # of the node; the server answers on node 0
    address: str  # of node 0, where the parts meet
    port: int


@dataclass(frozen=True)
class SamplingParams:
    """The choice of tokens and the end of a response. The defaults are off; `temperature` 0 is greedy.

    Changes of the choice follow vLLM's order: allowed tokens, bad words, penalties (repetition, frequency,
    presence), temperature, min-p, top-k, top-p.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0  # of the likeliest token's probability (Nguyen et al. 2024)
    repetition_penalty: float = 1.0  # of tokens in prompt or response: l / r where l > 0, l * r elsewhere (CTRL)
    presence_penalty: float = 0.0  # taken off the logit of a token that the response has (OpenAI)
    frequency_penalty: float = 0.0  # taken off once for each occurrence
    stop: tuple[str, ...] = ()  # the response ends with the token that completes one of them
    bad_words: tuple[tuple[int, ...], ...] = ()  # never in a response: the last token is not drawn behind the others
    allowed_token_ids: tuple[int, ...] | None = None  # nothing else is drawn
    num_likeliest: int = 0  # tokens whose log-probs are told in every place, beside the sampled one's


@dataclass(frozen=True)
class Request:
    """A response to sample. Equal `key`s draw equal random numbers, whatever else is sampled beside them.

    `sampled_ids` are tokens of the response that an earlier attempt sampled. Draws, penalties, stops and
    `params.max_new_tokens` count from the start of the response, so the tokens are those of an undisturbed attempt.
    """

    uid: str  # names the request among those of the engine
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    key: int  # from whet.keyed.key
    attempt: int = 0
    sampled_ids: tuple[int, ...] = ()
    media: tuple[Media, ...] = ()  # of the prompt
    opening: int | None = None  # tokens of the prompt before the first response in it; unset: all
    deadline_seconds: float | None = None  # from submission; a request that takes longer fails
    keeps_cache: bool = False  # a request that begins with this prompt and its response may follow
    streams: bool = False  # new tokens come as Partial events while it runs, where the engine can; none comes twice

    @cached_property
    def identity(self) -> Identity:
        """Token ids and media digests of the prompt: requests share the computation of what they agree in.

        Raises: DataError where ids and media do not agree."""
        if not self.media:
            return self.prompt_ids
        ids: list[int | str] = list(self.prompt_ids)
        for each, places in zip(self.media, patches(self.prompt_ids, self.media), strict=True):
            ids[places[0]] = each.digest
        return tuple(ids)


@dataclass(frozen=True)
class Completion:
    """The tokens that one request sampled, the stop token included, and all tokens of a stop string.

    The text of a response is that of all its tokens (vLLM's include_stop_str_in_output): rewards and environments
    read what is trained on, with the stop string and the rest of its last token.
    """

    token_ids: tuple[int, ...]
    # log_softmax(logits / temperature), temperature 1 when greedy, before anything else that changes the choice
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    versions: Versions  # the weights that sampled the tokens, stamped by the engine
    stop: str | None = None  # the stop string that ended it
    likeliest: tuple[Likeliest, ...] = ()  # in the place of each token, where they are asked for
    routed: tuple[bytes, ...] = ()  # in the place of each token, where the engine tells them: see `Turn.routed`
    preemptions: int = field(default=0, compare=False)  # times it made room for others: no part of the response

    def as_partial(self, uid: str, attempt: int, offset: int) -> Partial:
        """The same tokens, of a request that is still running."""
        return Partial(uid, attempt, offset, self.token_ids, self.log_probs, self.versions, self.likeliest, self.routed)


@dataclass(frozen=True)
class Partial:
    """Tokens of a request that is still running: those from `offset` (counted in the response) on."""

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
    """The end of a request, also of one that was aborted."""

    uid: str
    attempt: int
    completion: Completion


@dataclass(frozen=True)
class Failed:
    """A request that the engine gave up."""

    uid: str
    attempt: int
    failure: Failure


Event = Partial | Finished | Failed


@dataclass(frozen=True)
class Lost:
    """The loss of a whole replica with all of its requests; it can be started again."""

    why: str


@dataclass(frozen=True)
class Status:
    """A rollout engine at one moment."""

    version: int  # of the weights
    running: int  # requests
    waiting: int  # requests
    oldest: str | None = None  # uid of the unfinished request that was submitted first
    oldest_seconds: float = 0.0  # since its submission


class RolloutEngine(Protocol):
    """A replica that samples from a policy whose weights come from outside."""

    def submit(self, request: Request) -> bool:
        """Takes a request without waiting; False when the engine is full. A request that is there already, by uid and
        attempt, is not taken twice; a later attempt replaces an earlier one.

        Raises: EngineError for a request that can never fit.
        """
        ...

    def poll(self, timeout_seconds: float) -> list[Event]:
        """Returns the events since the last call as soon as there are any, at the latest after `timeout_seconds`.

        Raises: EngineError; WeightSyncError where the last weights did not arrive whole.
        """
        ...

    def abort(self, uids: Collection[str]) -> None:
        """Ends requests: each comes out as Finished with finish_reason "abort" and the tokens so far."""
        ...

    def pause(self) -> None:
        """Stops sampling: every running request gives its tokens so far as Partial, then nothing until `resume`."""
        ...

    def resume(self) -> None:
        """Goes on after `pause`."""
        ...

    def load(self, weights: Weights, version: int) -> None:
        """Fills the engine's own module between two decode steps. Running requests go on under the new weights; what
        the engine remembers of their tokens (keys and values) is computed again, or kept where it was built so.

        Raises: WeightSyncError for weights that do not fit; what `weights` raises. Then nothing is sampled until all
        weights of a version came.
        """
        ...

    def status(self) -> Status:
        """Version of the weights, and what runs and waits."""
        ...

    def close(self) -> None:
        """Frees everything. Unfinished requests are lost."""
        ...


@runtime_checkable
class SharesModule(Protocol):
    """The ability to sample from a module of this process."""

    def attach(self, module: PreTrainedModel, version: int, *, is_own: bool = False) -> None:
        """Samples from `module` itself, without a copy, from now on; with its present weights as `version`. A module
        that is the engine's own may be filled by `load`, and leaves the device while the engine sleeps."""
        ...

    def adopt(self, module: PreTrainedModel) -> None:
        """Makes a module of its own like `module`, without adapters and in the rollout dtype, for `load`."""
        ...


@runtime_checkable
class LoadsAdapter(Protocol):
    """The ability to sample with an adapter beside weights that stay."""

    takes_adapter: bool  # built for it

    def load_adapter(self, weights: Weights, version: int) -> None:
        """Replaces the adapter between two decode steps; `weights` are those of an adapter's folder, made by the
        settings `model.lora` of the model that the engine was given.

        Raises: as `load`."""
        ...


@runtime_checkable
class TakesDelta(Protocol):
    """The choice of weights that come to its process as their changes since the last version."""

    takes_delta: bool


@runtime_checkable
class Sleeps(Protocol):
    """The ability to leave the device to others between rollouts."""

    def sleep(self) -> None:
        """Frees what sampling alone needs: the cache of keys and values, and an own module's place on the device."""
        ...

    def wake(self) -> None:
        """Undoes `sleep`."""
        ...


@runtime_checkable
class TellsPrompts(Protocol):
    """The ability to tell log-probs of the tokens of a prompt."""

    def prompt_log_probs(self, prompt: Sequence[int], count: int) -> PromptLogProbs:
        """Log-probs of the tokens behind the first, at temperature 1, and the `count` likeliest in their places."""
        ...


@runtime_checkable
class Restarts(Protocol):
    """The ability to start again after a LostReplicaError of `submit`, `poll` or `abort`.

    Until then the other methods do nothing, but for `load`, which keeps the weights."""

    def check(self, request: Request) -> None:
        """Raises: EngineError for a request that it can never sample, as `submit` does."""
        ...

    def restart(self) -> None:
        """Starts what samples, without requests. It may take minutes, and `load` may be called meanwhile.

        Raises: EngineError."""
        ...

    def rejoin(self) -> None:
        """Samples again, with the newest weights that were loaded.  Raises: EngineError."""
        ...


POLL_SECONDS = 1.0


def generate(engine: RolloutEngine, requests: Sequence[Request], deadline_seconds: float = 3600.0) -> list[Completion]:
    """Samples all requests and returns one completion a request, in their order.

    Raises: DeadlineError; EngineError for a request that failed and for equal uids; what the engine raises.
    """
    if len(uids := Counter(request.uid for request in requests)) < len(requests):
        [(uid, count)] = uids.most_common(1)
        raise EngineError(f"request {uid}", f"is one of {count} with this uid", "a uid of its own for each")
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
    """Ends requests whose completions nobody reads, after an error."""
    with suppress(WhetError):  # of an engine that the error came from
        engine.abort(uids)
        engine.poll(0.0)


def late(engine: RolloutEngine, deadline_seconds: float, unfinished: int, total: int) -> DeadlineError:
    """The error of a rollout that did not end in time."""
    status = engine.status()
    found = f"waited {deadline_seconds:g} s for {unfinished} of {total} responses ({status.running} running, "
    found += f"{status.waiting} waiting, the oldest {status.oldest})"
    change = "raise rollout.deadline_seconds or shorten the responses with data.max_response_length"
    return DeadlineError("rollout", found, "", change)
