# SPDX-License-Identifier: Apache-2.0
"""Samples from several modules on one device with one rollout engine. The modules take turns."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel

from whet.errors import WhetError
from whet.guard import RefusedError
from whet.plugins.serving.engine_thread import named
from whet.rollout.protocol import (
    Completion,
    Event,
    Failed,
    Finished,
    Partial,
    Request,
    RolloutEngine,
    SharesModule,
    Status,
)
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


class Samplers:
    """A rollout engine for several weights: each request names its weights. When idle, it switches to the weights of
    the oldest waiting request. While requests for other weights wait, it starts none for the current weights."""

    def __init__(self, engine: Shared, module: Callable[[str, str | None], PreTrainedModel]) -> None:
        """Wraps an engine. `module` returns the module with given weights; it may raise WhetError or RefusedError."""
        self._engine, self._module = engine, module
        self._waiting: OrderedDict[Source, deque[SampleRequest]] = OrderedDict()
        self._source: Source | None = None
        self._attached: PreTrainedModel | None = None
        self._running: set[str] = set()
        self._lost: list[Event] = []
        self._switches = 0
        self.lost: WhetError | None = None  # the error of lost training ranks: no model can be trained any more
        self.spent = 0.0  # seconds of the last call on a model; sampling then gets as many

    def submit(self, request: SampleRequest) -> bool:
        """Queues a request."""
        self._waiting.setdefault(request.source, deque()).append(request)
        return True

    def poll(self, timeout_seconds: float) -> list[Event]:
        """Decodes, and returns events.  Raises: errors of the engine, and the error `lost` of the training ranks."""
        if self.lost is not None:
            raise self.lost
        until = time.monotonic() + max(timeout_seconds, min(self.spent, MOST_SECONDS))
        self.spent, events = 0.0, list[Event]()
        while True:
            if not self._running and self._waiting:
                self._switch()
            elif self._source in self._waiting and len(self._waiting) == 1:
                self._begin()
            events += self._lost
            self._lost = []
            found = self._engine.poll(max(0.0, min(timeout_seconds, until - time.monotonic()))) if self._running else []
            self._running -= {event.uid for event in found if not isinstance(event, Partial)}
            events += found
            if time.monotonic() >= until or not (self._running or self._waiting):
                return events

    def _switch(self) -> None:
        """Switches to the weights that have waited longest, and starts all of their requests."""
        source = next(iter(self._waiting))
        try:
            module = self._loaded(*source)
            if module is not self._attached:
                self._switches += 1
                self._engine.attach(module, self._switches)
            self._source, self._attached = source, module
        except (WhetError, RefusedError) as error:
            failure = Failure("engine", str(error))
            self._lost += [Failed(each.uid, each.attempt, failure) for each in self._waiting.pop(source)]
            return
        self._begin()

    def _loaded(self, owner: str, path: str | None) -> PreTrainedModel:
        """Returns the module with given weights.  Raises: WhetError, RefusedError."""
        try:
            return self._module(owner, path)
        except (WhetError, RefusedError):
            raise
        except UNREADABLE as error:
            log.error("the weights %s were not loaded", path, exc_info=error)
            raise named(error) from error

    def _begin(self) -> None:
        assert self._source is not None
        for request in self._waiting.pop(self._source):
            try:
                self._engine.submit(request)
                self._running.add(request.uid)
            except WhetError as error:
                self._lost.append(Failed(request.uid, request.attempt, Failure("engine", str(error))))

    def abort(self, uids: Collection[str]) -> None:
        """Ends requests."""
        for source, queue in list(self._waiting.items()):
            ended = [request for request in queue if request.uid in uids]
            for request in ended:
                queue.remove(request)
                self._lost.append(Finished(request.uid, request.attempt, Completion((), (), "abort", ())))
            if not queue:
                del self._waiting[source]
        self._engine.abort(self._running.intersection(uids))

    def status(self) -> Status:
        """Returns the numbers of running and waiting requests."""
        return Status(self._switches, len(self._running), sum(map(len, self._waiting.values())))

    def close(self) -> None:
        """Frees all resources."""
        self._engine.close()
