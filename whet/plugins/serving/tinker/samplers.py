# SPDX-License-Identifier: Apache-2.0
"""Samples from several modules on one device with one rollout engine. The modules take turns."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from transformers import PreTrainedModel

from whet.errors import WhetError
from whet.guard import RefusedError
from whet.plugins.serving.engine_thread import named
from whet.rollout.ledger import Ledger
from whet.rollout.protocol import Completion, Event, Failed, Finished, Request, RolloutEngine, SharesModule, Status
from whet.serialization import MALFORMED
from whet.types import Failure

log = logging.getLogger(__name__)
Source = tuple[str, str | None]  # an owner, and a path of theirs; None: the base model
# Errors of reading a checkpoint, too little memory among them; they concern the requests for its weights alone.
UNREADABLE = (*MALFORMED, OSError, MemoryError, RuntimeError)
MOST_SECONDS = 2.0  # of sampling between two calls


class Shared(RolloutEngine, SharesModule, Protocol):
    """A rollout engine that can sample from modules of this process."""


@dataclass(frozen=True)
class SampleRequest(Request):
    """A request with the name of the weights (`source`) to sample from."""

    source: Source = ("", None)


@dataclass
class LiveSample:
    """An unfinished request. It waits for its weights, or the engine has it."""

    request: SampleRequest
    is_running: bool = False
    submitted_at: float = field(default_factory=time.monotonic)


class Samplers:
    """A rollout engine for several weights: each request names its weights. When idle, it switches to the weights of
    the oldest waiting request. While requests for other weights wait, it starts none for the current weights."""

    def __init__(self, engine: Shared, module: Callable[[str, str | None], PreTrainedModel]) -> None:
        """Wraps an engine. `module` returns the module with given weights; it may raise WhetError or RefusedError."""
        self._engine, self._module = engine, module
        self._live, self._num_running = Ledger[LiveSample](), 0
        self._source: Source | None = None
        self._attached: PreTrainedModel | None = None
        self._ended: list[Event] = []  # of requests that ended outside of the engine
        self._switches = 0
        self.lost: WhetError | None = None  # the error of lost training ranks: no model can be trained any more
        self.spent = 0.0  # seconds of the last call on a model; sampling then gets as many

    def submit(self, request: SampleRequest) -> bool:
        """Queues a request; returns False at MAX_UNFINISHED requests."""
        if (answer := self._live.answer(request)) is not None:
            return answer
        if (earlier := self._live.pop(request.uid, None)) is not None and earlier.is_running:
            self._engine.abort([request.uid])
            self._num_running -= 1
        self._live[request.uid] = LiveSample(request)
        return True

    def poll(self, timeout_seconds: float) -> list[Event]:
        """Decodes, and returns events.  Raises: errors of the engine, and the error `lost` of the training ranks."""
        if self.lost is not None:
            raise self.lost
        until = time.monotonic() + max(timeout_seconds, min(self.spent, MOST_SECONDS))
        self.spent, events = 0.0, list[Event]()
        while True:
            waiting = self._waiting() if len(self._live) > self._num_running else {}
            if waiting and not self._num_running:
                self._switch(*next(iter(waiting.items())))
            elif self._source is not None and [*waiting] == [self._source]:
                self._begin(waiting[self._source])
            events, self._ended = [*events, *self._ended], []
            for event in self._engine.poll(max(0.0, min(timeout_seconds, until - time.monotonic()))):
                live = self._live.get(event.uid)
                if live is not None and live.request.attempt == event.attempt:  # else it was replaced
                    events.append(event)
                    if isinstance(event, Finished | Failed):
                        del self._live[event.uid]
                        self._num_running -= 1
            if time.monotonic() >= until or not self._live:
                return events

    def _waiting(self) -> dict[Source, list[LiveSample]]:
        """Returns the waiting requests by their weights. The weights that have waited longest are first."""
        found: dict[Source, list[LiveSample]] = {}
        for each in self._live.values():
            if not each.is_running:
                found.setdefault(each.request.source, []).append(each)
        return found

    def _switch(self, source: Source, waiting: Sequence[LiveSample]) -> None:
        """Switches to the weights `source`, and starts all requests for them."""
        try:
            module = self._loaded(*source)
            if module is not self._attached:
                self._switches += 1
                self._engine.attach(module, self._switches)
            self._source, self._attached = source, module
        except (WhetError, RefusedError) as error:
            for each in waiting:
                self._fail(each.request, error)
            return
        self._begin(waiting)

    def _loaded(self, owner: str, path: str | None) -> PreTrainedModel:
        """Returns the module with given weights.  Raises: WhetError, RefusedError."""
        try:
            return self._module(owner, path)
        except (WhetError, RefusedError):
            raise
        except UNREADABLE as error:
            log.error("the weights %s were not loaded", path, exc_info=error)
            raise named(error) from error

    def _begin(self, waiting: Sequence[LiveSample]) -> None:
        for each in waiting:
            try:
                each.is_running = self._engine.submit(each.request)
                self._num_running += each.is_running
            except WhetError as error:
                self._fail(each.request, error)

    def _fail(self, request: SampleRequest, error: Exception) -> None:
        del self._live[request.uid]
        self._ended.append(Failed(request.uid, request.attempt, Failure("engine", str(error))))

    def abort(self, uids: Collection[str]) -> None:
        """Ends requests."""
        live = [self._live[uid] for uid in uids if uid in self._live]
        for request in (each.request for each in live if not each.is_running):
            del self._live[request.uid]
            self._ended.append(Finished(request.uid, request.attempt, Completion((), (), "abort", ())))
        self._engine.abort([each.request.uid for each in live if each.is_running])

    def status(self) -> Status:
        """Returns the numbers of running and waiting requests, and the oldest request."""
        return self._live.status(self._switches, self._num_running)

    def close(self) -> None:
        """Frees all resources."""
        self._engine.close()
