# SPDX-License-Identifier: Apache-2.0
"""An engine that samples alone and is started again where it is lost: `Router` with one replica, and its driver."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Protocol, TypeVar

from whet.errors import LostReplicaError
from whet.rollout.protocol import Event, Failed, Request, Restarts, RolloutEngine
from whet.rollout.router import Abort, Command, Generation, Give, Router, Tell
from whet.types import Failure

log = logging.getLogger(__name__)
T = TypeVar("T")


class RestartingEngine(RolloutEngine, Restarts, Protocol):
    """A rollout engine that may be lost."""


class Restarted:
    """The same engine, whose loss only delays requests: their tokens are those of an engine that was never lost.

    The methods of `RolloutEngine` that are not here are the engine's own."""

    def __init__(self, engine: RestartingEngine) -> None:
        self.engine, self._router = engine, Router(sys.maxsize)
        self._events: list[Event] = []
        self._join()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, request: Request) -> bool:
        """Implements `RolloutEngine.submit`."""
        self._carry_out(self._router.submit(request))
        return self._give()

    def poll(self, timeout_seconds: float) -> list[Event]:
        """Implements `RolloutEngine.poll`; takes as long as a lost engine needs to start."""
        if not self._events:
            found = self._try(lambda: self.engine.poll(timeout_seconds)) or []
            self._carry_out(self._router.on_events(0, self._generation, found))
        events, self._events = self._events, []
        return events

    def abort(self, uids: Collection[str]) -> None:
        """Implements `RolloutEngine.abort`."""
        self._carry_out(self._router.abort(uids))

    @property
    def _generation(self) -> Generation:
        return self._router.replicas[0].generation

    def _join(self) -> None:
        self._router.on_join(0)
        self._router.on_loaded(0, self._generation, 0)

    def _try(self, call: Callable[[], T]) -> T | None:
        """The result of a call of the engine; None where that was lost, and is started again with all requests."""
        try:
            return call()
        except LostReplicaError as error:
            log.warning("the rollout engine is started again: %s", error)
            self._carry_out(self._router.on_lost(0, self._generation))
            self.engine.restart()
            self.engine.rejoin()
            self._join()
            self._give()
        return None

    def _give(self) -> bool:
        """Gives the engine what waits.  Returns False where it is full."""
        for request in [each for give in self._router.give() if isinstance(give, Give) for each in give.requests]:
            is_taken: bool | None = False
            try:
                is_taken = self._try(partial(self.engine.submit, request))
            finally:
                if is_taken is False:  # it is as if it had never come
                    refused = Failed(request.uid, request.attempt, Failure("engine", "it was not taken"))
                    self._router.on_events(0, self._generation, [refused])
            if not is_taken:
                return is_taken is None
        return True

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Tell):
                self._events.append(command.event)
            elif isinstance(command, Abort):
                self._try(partial(self.engine.abort, command.uids))
