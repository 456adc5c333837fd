# SPDX-License-Identifier: Apache-2.0
"""The words in which an engine speaks to its server, and the requests that it speaks of."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from whet.errors import ConfigError
from whet.plugins.inference.servers.weights import Part
from whet.rollout.planned import Sampling
from whet.rollout.protocol import Completion, Request, Span
from whet.types import FinishReason, Versions

NEVER_SENT = Completion((), (), "abort", ())


@dataclass(eq=False)
class Live:
    """An unfinished request, and the call of the server that answers it."""

    request: Request
    name: str  # of this attempt, for the server
    submitted_at: float = field(default_factory=time.monotonic)
    is_sent: bool = False
    is_cut: bool = False  # the server is asked to end it, and it is sent again
    before: Completion = NEVER_SENT  # what it had when it was sent again
    known: Versions = ()  # of its tokens at the last change of weights, where it streams
    call: Future[None] = field(default_factory=Future)

    @property
    def rest(self) -> Request:
        """Returns what is left to sample, for the server."""
        return replace(self.request, sampled_ids=self.request.sampled_ids + self.before.token_ids)


class ServerWords(ABC):
    """The calls that every server has under names of its own."""

    @classmethod
    @abstractmethod
    def refused(cls, sampling: Sampling, options: Mapping[str, Any]) -> ConfigError | None:
        """Returns the error of a sampling parameter that a server with these options cannot follow."""

    @classmethod
    @abstractmethod
    def spanning(cls, span: Span) -> dict[str, Any]:
        """The arguments of the part that a node has of a server on several."""

    @abstractmethod
    def prepare(self) -> None:
        """Makes ready a server that has just started."""

    @abstractmethod
    async def sample(self, live: Live) -> Completion:
        """Sends a request and waits for its completion, in the client's thread. Where it streams, its tokens may come
        before (`stream`).  Raises: EngineError, OSError."""

    @abstractmethod
    def end(self, names: list[str]) -> None:
        """Asks the server to end requests that it runs; unknown names are no error."""

    @abstractmethod
    def hold(self, *, keep_cache: bool) -> None:
        """Stops sampling between two decode steps; without `keep_cache` running requests compute all again."""

    @abstractmethod
    def release(self) -> None:
        """Goes on after `hold`."""

    @abstractmethod
    def so_far(self) -> Iterable[tuple[Live, Completion]]:
        """The unfinished requests with their tokens, while the server is on hold."""

    @abstractmethod
    def count(self) -> int:
        """The number of tokens that unfinished requests have."""

    @abstractmethod
    def update(self, parts: Iterable[list[Part]], version: int) -> None:
        """Loads all weights, part by part, while the server is on hold. A part is a list: what each device of the
        server is to be told of it. An earlier update may have broken off.
        Raises: HttpError; whatever `parts` raises."""

    @abstractmethod
    def sleep(self) -> None:
        """Frees the accelerator: the cache of keys and values, and the weights' place.  Raises: EngineError."""

    @abstractmethod
    def wake(self) -> None:
        """Undoes `sleep`.  Raises: EngineError."""


def in_server(chosen: Iterable[Live]) -> list[Live]:
    """Returns those that the server works on."""
    return [live for live in list(chosen) if live.is_sent and not live.call.done()]


def end_of(found: Completion, request: Request) -> FinishReason | None:
    """Tells why a response ends with the tokens that it had when it was cut; None where it goes on."""
    if found.token_ids and found.token_ids[-1] in request.params.stop_token_ids:
        return "stop"
    is_long = len(request.sampled_ids) + len(found.token_ids) >= request.params.max_new_tokens
    return "length" if is_long else None
