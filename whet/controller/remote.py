# SPDX-License-Identifier: Apache-2.0
"""The caller's side of workers in other processes: which calls are under way, and one end for all.

A launch may have several pools. They share one transport, so the first failure anywhere ends every process.
"""

from __future__ import annotations

import logging
import pickle
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, TypeVar

from whet.controller import wire
from whet.controller.dispatch import Arguments, Plan, runs_beside
from whet.controller.hosted import BUILD
from whet.controller.resource_pool import ResourcePool
from whet.controller.worker import Layout, Worker, WorkerSpec
from whet.controller.worker_group import PendingCall, Reply, closed_error
from whet.errors import LostWorkerError, WhetError, WorkerError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Waiting:
    """A call that a process has yet to answer."""

    role: str
    method: str
    reply: Reply = field(default_factory=Future)
    number: int = field(default_factory=count(1).__next__)
    is_beside: bool = False  # others are served meanwhile


@dataclass(frozen=True, eq=False)
class Peer:
    """A worker process, and the calls that it has yet to answer, oldest first."""

    pool: ResourcePool
    rank: int  # in the pool
    waiting: deque[Waiting] = field(default_factory=deque)
    sending: threading.Lock = field(default_factory=threading.Lock)

    @property
    def where(self) -> str:
        """The text behind the rank in errors."""
        return ""

    def name(self, role: str = "") -> str:
        """Role, or all of them, and rank."""
        return f"{role or ', '.join(self.pool.roles)} rank {self.rank}{self.where}"


P = TypeVar("P", bound=Peer)


class RemoteTransport(ABC, Generic[P]):
    """A transport to processes. What a backend adds: how a call is handed over, and how processes end.

    Threads of the backend call `settle` with each answer and `abort` on a failure; any thread may send.
    """

    ECHO_SECONDS = 0.5  # a rank that dies makes collectives fail on the others: its death is heard first in this time

    def __init__(self, deadline_seconds: float) -> None:
        self.deadline_seconds = deadline_seconds
        self.peers: list[P] = []
        self.ended = threading.Event()
        self._state = threading.Lock()  # over _ended_by and every peer's `waiting`
        self._ended_by: WhetError | None = None
        self._is_built = False
        self._classes: dict[str, type[Worker]] = {}  # by role

    def build(self, specs: Sequence[WorkerSpec]) -> dict[str, list[Layout]]:
        """Lets every process build its workers.  Returns the layout of each rank by role.

        Raises: WorkerError or the WhetError that a constructor raised; DeadlineError. The processes are gone then."""
        self._classes = {spec.role: spec.cls for spec in specs}
        try:
            calls = [self._build(spec) for spec in specs]
            layouts = {spec.role: call.result() for spec, call in zip(specs, calls, strict=True)}
        except BaseException:
            self.abort(WorkerError("the workers could not be started"))
            raise
        self._is_built = True
        return layouts

    def send(self, role: str, method: str, arguments: Mapping[int, Arguments | WorkerSpec]) -> dict[int, Reply]:
        """Implements `Transport.send`. Arguments that several ranks share are pickled once."""
        header = pickle.dumps((role, method))
        try:
            encoded = {id(given): wire.encode(given) for given in {id(g): g for g in arguments.values()}.values()}
        except Exception as error:
            raise WorkerError(
                f"{role}.{method}: what it is given cannot travel to another process: {error}; pass plain values, and "
                "functions and classes of a module"
            ) from error
        payloads = {number: self.prepare(frames) for number, frames in encoded.items()}
        peers = [peer for peer in self.peers if role in peer.pool.roles]
        is_beside = runs_beside(self._classes[role], method)
        return {
            rank: self._send(peers[rank], Waiting(role, method, is_beside=is_beside), header, payloads[id(given)])
            for rank, given in arguments.items()
        }

    def abort(self, error: WhetError) -> None:
        """Implements `Transport.abort`."""
        self._end(error, is_orderly=False)

    def close(self) -> None:
        """Implements `Transport.close`."""
        self._end(WorkerError("close() was called"), is_orderly=True)

    def settle(self, peer: P, frames: Sequence[wire.Frame], number: int) -> None:
        """Gives the call of a process that has this number its answer."""
        try:
            succeeded, result = wire.decode(frames)
        except Exception as error:
            succeeded, result = False, WorkerError(f"{peer.name()}: its answer cannot be read here: {error}")
        if not succeeded:
            if not self.ended.wait(self.ECHO_SECONDS):
                self.abort(result)
            return
        with self._state:
            if self._ended_by is not None:
                return
            waiting = next((each for each in peer.waiting if each.number == number), None)
            if waiting is not None:
                peer.waiting.remove(waiting)
        if waiting is None:
            self.abort(WorkerError(f"{peer.name()} answered a call that it was not given"))
        else:
            waiting.reply.set_result(result)

    def oldest(self, peer: P) -> Waiting | None:
        """The call that a process is serving."""
        with self._state:
            return peer.waiting[0] if peer.waiting else None

    def death(self, peer: P, waiting: Waiting | None, reason: str, idle: str = "between two calls") -> LostWorkerError:
        """The error for a process that died in a call, or while it was `idle`."""
        if waiting is None:
            return LostWorkerError(f"{peer.name()} died {idle}: {reason}")
        return LostWorkerError(f"{peer.name(waiting.role)} died in {waiting.method}: {reason}")

    @abstractmethod
    def prepare(self, frames: list[wire.Frame]) -> Any:
        """Makes the payload of `hand_over` from arguments, once for all ranks that share them."""

    @abstractmethod
    def hand_over(self, peer: P, waiting: Waiting, header: bytes, payload: Any) -> None:
        """Starts one call on one process; aborts where that fails."""

    @abstractmethod
    def end_processes(self, *, is_orderly: bool) -> None:
        """Ends all processes and waits until they are gone; where `is_orderly`, workers may close first."""

    def _build(self, spec: WorkerSpec) -> PendingCall:
        ranks = range(sum(spec.role in peer.pool.roles for peer in self.peers))
        plan = Plan({}, lambda layouts: [layouts[rank] for rank in ranks])
        replies = self.send(spec.role, BUILD, dict.fromkeys(ranks, spec))
        return PendingCall(spec.role, BUILD, replies, plan, self, self.deadline_seconds)

    def _send(self, peer: P, waiting: Waiting, header: bytes, payload: Any) -> Reply:
        with peer.sending:  # so that calls wait in the order in which they were sent
            with self._state:
                if self._ended_by is not None:
                    raise closed_error(waiting.role, waiting.method, self._ended_by)
                peer.waiting.append(waiting)
            self.hand_over(peer, waiting, header, payload)
        return waiting.reply

    def _end(self, error: WhetError, *, is_orderly: bool) -> None:
        """Lets no further call in, ends the processes, then fails the calls under way. Only the first end counts."""
        with self._state:
            if self._ended_by is not None:
                return
            self._ended_by = error
            waiting = [each for peer in self.peers for each in peer.waiting]
            for peer in self.peers:
                peer.waiting.clear()
        self.ended.set()
        if self._is_built and not waiting and not is_orderly:
            log.error("%s", error)  # nobody waits for it: the next call will say so too
        self.end_processes(is_orderly=is_orderly)
        for each in waiting:
            each.reply.set_exception(error)
