# SPDX-License-Identifier: Apache-2.0
"""The calls that differ between servers, and the requests that they handle."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from whet.errors import ConfigError
from whet.plugins.inference.servers.weights import Part
from whet.rollout.protocol import Completion, Request, Span
from whet.rollout.requirements import Sampling
from whet.types import FinishReason, Versions

NEVER_SENT = Completion((), (), "abort", ())


@dataclass(eq=False)
class Live:
    """An unfinished request, and the server call that answers it."""

    request: Request
    name: str  # of this attempt, unique on the server
    submitted_at: float = field(default_factory=time.monotonic)
    is_sent: bool = False
    is_cut: bool = False  # the server is asked to end it, and it is sent again
    before: Completion = NEVER_SENT  # its tokens when it was sent again
    known: Versions = ()  # versions of its tokens at the last change of weights, if it streams
    call: Future[None] = field(default_factory=Future)

    @property
    def rest(self) -> Request:
        """Returns the request to send next: the request with all tokens sampled so far."""
        return replace(self.request, sampled_ids=self.request.sampled_ids + self.before.token_ids)


class ServerWords(ABC):
    """The calls that every server supports; a subclass translates them into the calls of its server."""

    @classmethod
    @abstractmethod
    def refused(cls, sampling: Sampling, options: Mapping[str, Any]) -> ConfigError | None:
        """Returns the error for a sampling parameter that a server with these options does not support."""

    @classmethod
    @abstractmethod
    def spanning(cls, span: Span) -> dict[str, Any]:
        """Returns the arguments for this node's part of a server that spans several nodes."""

    @abstractmethod
    def prepare(self) -> None:
        """Prepares a server that has just started."""

    @abstractmethod
    async def sample(self, live: Live) -> Completion:
        """Sends a request and waits for its completion, in the client's thread. A streamed request returns tokens
        earlier, through `stream`.  Raises: EngineError, OSError."""

    @abstractmethod
    def end(self, names: list[str]) -> None:
        """Asks the server to end running requests; unknown names are no error."""

    @abstractmethod
    def hold(self, *, keep_cache: bool) -> None:
        """Stops sampling between two decode steps; without `keep_cache` running requests recompute keys and values."""

    @abstractmethod
    def release(self) -> None:
        """Continues sampling after `hold`."""

    @abstractmethod
    def so_far(self) -> Iterable[tuple[Live, Completion]]:
        """Returns the unfinished requests with their tokens, between `hold` and `release`."""

    @abstractmethod
    def count(self) -> int:
        """Returns the number of tokens of all unfinished requests."""

    @abstractmethod
    def update(self, parts: Iterable[list[Part]], version: int) -> None:
        """Loads all weights, part by part, between `hold` and `release`. A part is a list with an item for each device
        of the server. An earlier update may have been interrupted.  Raises: HttpError; errors of `parts`."""

    @abstractmethod
    def sleep(self) -> None:
        """Frees the accelerator's memory of the KV cache and the weights.  Raises: EngineError."""

    @abstractmethod
    def wake(self) -> None:
        """Allocates the memory again after `sleep`.  Raises: EngineError."""


def in_server(chosen: Iterable[Live]) -> list[Live]:
    """Returns the requests that the server is working on."""
    return [live for live in list(chosen) if live.is_sent and not live.call.done()]


def end_of(found: Completion, request: Request) -> FinishReason | None:
    """Returns the finish reason of an aborted response whose tokens already complete it; None if sampling continues."""
    if found.token_ids and found.token_ids[-1] in request.params.stop_token_ids:
        return "stop"
    is_long = len(request.sampled_ids) + len(found.token_ids) >= request.params.max_new_tokens
    return "length" if is_long else None
