# SPDX-License-Identifier: Apache-2.0
"""The caller's side of workers in other processes: sends calls, keeps the calls without a reply, ends the processes.

The pools of a launch share one transport, so the first failure in any of them ends every process. The loss of a replica
(`Worker.is_replica`) is the exception: the other processes keep running, and the replica may be started again."""

from __future__ import annotations

import logging
import pickle
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, TypeVar

from whet.controller import wire
from whet.controller.dispatch import Arguments, CallPlan, is_concurrent
from whet.controller.local_workers import BUILD
from whet.controller.worker import RankLayout, ResourcePool, WorkerSpec
from whet.controller.worker_group import LAUNCH_AGAIN, PendingCall, Reply, closed_error, stopped
from whet.errors import LostWorkerError, WhetError, WorkerError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenCall:
    """A call to a process that has no reply yet."""

    role: str
    method: str
    reply: Reply = field(default_factory=Future)
    number: int = field(default_factory=count(1).__next__)
    is_concurrent: bool = False  # other calls are served at the same time


@dataclass(frozen=True, eq=False)
class WorkerConnection:
    """A worker process, with its open calls, oldest first."""

    pool: ResourcePool
    rank: int  # in the pool
    calls: deque[OpenCall] = field(default_factory=deque)
    sending: threading.Lock = field(default_factory=threading.Lock)

    @property
    def where(self) -> str:
        """Returns the text that follows the rank in errors, such as " on 10.0.0.2"."""
        return ""

    def name(self, role: str = "") -> str:
        """Returns role (default: all roles of the pool) and rank, for errors."""
        return f"{role or ', '.join(self.pool.roles)} rank {self.rank}{self.where}"


P = TypeVar("P", bound=WorkerConnection)


class RemoteTransport(ABC, Generic[P]):
    """A transport to worker processes. A backend implements the start of a call and the end of processes.

    Threads of the backend call `complete` with each reply, and `abort` on a failure. Any thread may send."""

    # When a rank dies, collectives fail on other ranks. Their errors wait this long: the death is reported first.
    ECHO_SECONDS = 0.5

    def __init__(self, deadline_seconds: float) -> None:
        self.deadline_seconds = deadline_seconds
        self.peers: list[P] = []
        self.ended = threading.Event()
        self._state = threading.Lock()  # guards _ended_by, _losses and the `calls` of every peer
        self._ended_by: WhetError | None = None
        self._is_built = False
        self._specs: dict[str, WorkerSpec] = {}  # by role
        self._losses: dict[WorkerConnection, WhetError] = {}  # errors of lost replicas
        self._starter = ThreadPoolExecutor(thread_name_prefix="start")
        self._starting = threading.Lock()  # so that no process starts after the end

    def build(self, specs: Sequence[WorkerSpec]) -> dict[str, list[RankLayout]]:
        """Builds the workers in every process.  Returns the layouts of the ranks, by role.

        Raises: WorkerError or the WhetError that a constructor raised; DeadlineError. All processes have then ended."""
        self._specs = {spec.role: spec for spec in specs}
        try:
            calls = [self._build(spec) for spec in specs]
            layouts = {spec.role: call.result() for spec, call in zip(specs, calls, strict=True)}
        except BaseException:
            self.abort(stopped("not started"))
            raise
        self._is_built = True
        return layouts

    def send(self, role: str, method: str, arguments: Mapping[int, Arguments | WorkerSpec]) -> dict[int, Reply]:
        """Implements `Transport.send`. Arguments that several ranks share are pickled once."""
        if self._ended_by is not None:
            raise closed_error(role, method, self._ended_by)
        header = pickle.dumps((role, method))
        try:
            encoded = {key: wire.encode(each) for key, each in {id(each): each for each in arguments.values()}.items()}
        except Exception as error:
            found, change = f"they do not pickle ({error})", "pass plain values, and functions and classes of a module"
            raise WorkerError(f"{role}.{method}: arguments", found, change=change) from error
        payloads = {number: self.prepare(frames) for number, frames in encoded.items()}
        peers = self._peers_of(role)
        concurrent = is_concurrent(self._specs[role].cls, method)
        return {
            rank: self._send(peers[rank], OpenCall(role, method, is_concurrent=concurrent), header, payloads[id(each)])
            for rank, each in arguments.items()
        }

    def abort(self, error: WhetError) -> None:
        self._end(error, is_orderly=False)

    def close(self) -> None:
        self._end(stopped("close() was called"), is_orderly=True)

    def give_up(self, role: str, ranks: Sequence[int], error: WhetError) -> None:
        for peer in [self._peers_of(role)[rank] for rank in ranks]:
            self.lose(peer, error)

    def lose(self, peer: P, error: WhetError) -> None:
        """Ends a lost or late process and fails its calls. Unless the process is a replica, all processes end."""
        if not self._is_built or not all(self._specs[role].cls.is_replica for role in peer.pool.roles):
            self.abort(error)
            return
        with self._state:
            if self._ended_by is not None or peer in self._losses:
                return
            self._losses[peer] = error
            calls = list(peer.calls)
            peer.calls.clear()
        self.end_process(peer)
        for call in calls:
            call.reply.set_exception(error)

    def start_again(self, role: str, rank: int) -> Reply:
        return self._starter.submit(self._start_again, role, rank)

    def complete(self, peer: P, frames: Sequence[wire.Frame], number: int) -> None:
        """Completes the open call `number` of a process with the reply in `frames`."""
        try:
            succeeded, result = wire.decode(frames)
        except Exception as error:
            readable = "objects of modules that this process can import"
            succeeded, result = False, WorkerError(f"{peer.name()}: reply", f"cannot be read ({error})", readable)
        if not succeeded:
            if not self.ended.wait(self.ECHO_SECONDS) and peer not in self._losses:
                self.abort(result)
            return
        with self._state:
            if self._ended_by is not None or peer in self._losses:
                return
            call = next((each for each in peer.calls if each.number == number), None)
            if call is not None:
                peer.calls.remove(call)
        if call is None:
            self.abort(WorkerError(peer.name(), "replied to a call that it did not get", "one reply for each call"))
        else:
            call.reply.set_result(result)

    def oldest(self, peer: P) -> OpenCall | None:
        """Returns the oldest open call of a process, which it is running; None between calls."""
        with self._state:
            return peer.calls[0] if peer.calls else None

    def death(
        self, peer: P, call: OpenCall | None, reason: str, idle: str = "between two calls", change: str = ""
    ) -> LostWorkerError:
        """Builds the error for a process that died during `call`, or between calls (`idle` describes this time)."""
        name = peer.name(call.role if call else "")
        return LostWorkerError(name, f"died {f'in {call.method}' if call else idle}: {reason}", change=change)

    @abstractmethod
    def prepare(self, frames: list[wire.Frame]) -> Any:
        """Converts the frames of arguments to a payload of `start_call`, once for all ranks that share them."""

    @abstractmethod
    def start_call(self, peer: P, call: OpenCall, header: bytes, payload: Any) -> None:
        """Starts a call on a process. On failure the process counts as lost."""

    @abstractmethod
    def open(self, lost: P) -> P:
        """Starts a process without workers, which replaces the process `lost`."""

    @abstractmethod
    def end_process(self, peer: P) -> None:
        """Ends one process, without waiting."""

    @abstractmethod
    def end_processes(self, *, is_orderly: bool) -> None:
        """Ends all processes and waits for their end. If `is_orderly`, the workers may close first."""

    def _peers_of(self, role: str) -> list[P]:
        return [peer for peer in self.peers if role in peer.pool.roles]

    def _start_again(self, role: str, rank: int) -> None:
        lost = self._peers_of(role)[rank]
        with self._starting:
            if self._ended_by is not None:
                raise closed_error(role, BUILD, self._ended_by)
            try:
                self.peers[self.peers.index(lost)] = self.open(lost)
            except OSError as error:
                found = f"cannot be started again ({error})"
                raise LostWorkerError(lost.name(), found, change=LAUNCH_AGAIN) from error
        for each in lost.pool.roles:
            self._build(self._specs[each], [rank]).result()

    def _build(self, spec: WorkerSpec, ranks: Iterable[int] | None = None) -> PendingCall:
        ranks = range(len(self._peers_of(spec.role))) if ranks is None else ranks
        plan = CallPlan({}, lambda layouts: [layouts[rank] for rank in ranks])
        replies = self.send(spec.role, BUILD, dict.fromkeys(ranks, spec))
        return PendingCall(spec.role, BUILD, replies, plan, self, self.deadline_seconds)

    def _send(self, peer: P, call: OpenCall, header: bytes, payload: Any) -> Reply:
        with peer.sending:  # keeps `peer.calls` in the order of sending
            with self._state:
                end = self._ended_by or self._losses.get(peer)  # either may come between the calls of two ranks
                if end is not None:
                    call.reply.set_exception(end)
                    return call.reply
                peer.calls.append(call)
            self.start_call(peer, call, header, payload)
        return call.reply

    def _end(self, error: WhetError, *, is_orderly: bool) -> None:
        """Refuses further calls, ends the processes, then fails the open calls. Only the first call has an effect."""
        with self._state:
            if self._ended_by is not None:
                return
            self._ended_by = error
            calls = [call for peer in self.peers for call in peer.calls]
            for peer in self.peers:
                peer.calls.clear()
        self.ended.set()
        if self._is_built and not calls and not is_orderly:
            log.error("%s", error)  # no open call can raise it; the next call will
        with self._starting:
            self.end_processes(is_orderly=is_orderly)
        for call in calls:
            call.reply.set_exception(error)
