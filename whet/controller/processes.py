# SPDX-License-Identifier: Apache-2.0
"""The caller's side of worker processes: it starts them, hands calls over, and ends them all when one of them fails."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.context import SpawnProcess

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from whet.controller import wire
from whet.controller.dispatch import Arguments, Plan
from whet.controller.host import BUILD, LOOPBACK, Rendezvous, host
from whet.controller.resource_pool import ResourcePool
from whet.controller.worker import Layout, WorkerSpec
from whet.controller.worker_group import PendingCall, Reply, closed_error
from whet.errors import DeadlineError, WhetError, WorkerError

CLOSE_SECONDS = 10.0  # for workers to close in, before their processes are killed
KILL_SECONDS = 5.0  # for the kernel to end a killed process in
ECHO_SECONDS = 0.5  # a rank that dies makes collectives fail on the others: its death is heard first in this time
SOCKET_BYTES = 1 << 20  # buffered by the kernel: 1.6 times the throughput of Linux's default


@dataclass(frozen=True)
class _Waiting:
    role: str
    method: str
    reply: Reply = field(default_factory=Future)


@dataclass(frozen=True)
class _Peer:
    """One worker process, and the calls that it has yet to answer, oldest first."""

    rank: int
    process: SpawnProcess
    socket: socket.socket
    waiting: deque[_Waiting] = field(default_factory=deque)
    sending: threading.Lock = field(default_factory=threading.Lock)


class ProcessTransport:
    """The transport to worker processes. A thread for each takes its answers; any thread may send."""

    def __init__(self, pool: ResourcePool, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._state = threading.Lock()  # over _ended_by and every peer's `waiting`
        self._ended_by: WhetError | None = None
        self._ended = threading.Event()
        self._store = _store(deadline_seconds)
        self._peers = [_start_peer(rank, pool, self._store.port, deadline_seconds) for rank in range(pool.processes)]
        for peer in self._peers:
            threading.Thread(target=self._receive, args=(peer,), daemon=True, name=peer.process.name).start()

    @classmethod
    def start(
        cls, specs: Sequence[WorkerSpec], pool: ResourcePool, deadline_seconds: float
    ) -> tuple[ProcessTransport, dict[str, list[Layout]]]:
        """Running processes with their workers built, and the layout of each rank by role."""
        transport = cls(pool, deadline_seconds)
        try:
            builds = [transport._build(spec) for spec in specs]
            return transport, {spec.role: build.result() for spec, build in zip(specs, builds, strict=True)}
        except BaseException:
            transport.abort(WorkerError("the workers could not be started"))
            raise

    def send(self, role: str, method: str, arguments: Mapping[int, Arguments | WorkerSpec]) -> dict[int, Reply]:
        """As `Transport.send`. Arguments that several ranks share are pickled once."""
        header = pickle.dumps((role, method))
        try:
            encoded = {id(given): wire.encode(given) for given in {id(g): g for g in arguments.values()}.values()}
        except Exception as error:
            raise WorkerError(
                f"{role}.{method}: what it is given cannot travel to another process: {error}; pass plain values, and "
                "functions and classes of a module"
            ) from error
        return {
            rank: self._send(self._peers[rank], _Waiting(role, method), [header, *encoded[id(given)]])
            for rank, given in arguments.items()
        }

    def abort(self, error: WhetError) -> None:
        waiting = self._end(error)
        if waiting is None:
            return
        for peer in self._peers:
            peer.process.kill()
        self._finish(waiting, error, KILL_SECONDS)

    def close(self) -> None:
        error = WorkerError("close() was called")
        waiting = self._end(error)
        if waiting is None:
            return
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_WR)
        self._finish(waiting, error, CLOSE_SECONDS)

    def _build(self, spec: WorkerSpec) -> PendingCall:
        ranks = range(len(self._peers))
        plan = Plan({}, lambda layouts: [layouts[rank] for rank in ranks])
        replies = self.send(spec.role, BUILD, dict.fromkeys(ranks, spec))
        return PendingCall(spec.role, BUILD, replies, plan, self, self._deadline_seconds)

    def _send(self, peer: _Peer, waiting: _Waiting, frames: list[wire.Frame]) -> Reply:
        with peer.sending:  # so that calls wait in the order in which they were sent
            with self._state:
                if self._ended_by is not None:
                    raise closed_error(waiting.role, waiting.method, str(self._ended_by))
                peer.waiting.append(waiting)
            try:
                wire.send(peer.socket, frames)
            except TimeoutError:
                self.abort(
                    DeadlineError(
                        f"{waiting.role} rank {peer.rank} did not take the arguments of {waiting.method} within "
                        f"{self._deadline_seconds:g} s; its processes were ended"
                    )
                )
            except OSError:
                self.abort(self._death(peer))
        return waiting.reply

    def _receive(self, peer: _Peer) -> None:
        with peer.socket:
            while True:
                ready = connection.wait([peer.socket, peer.process.sentinel])
                try:
                    if peer.socket not in ready:
                        raise EOFError
                    frames = wire.receive(peer.socket)
                except (EOFError, OSError):
                    if not self._ended.is_set():
                        self.abort(self._death(peer))
                    return
                self._settle(peer, frames)

    def _settle(self, peer: _Peer, frames: list[wire.Frame]) -> None:
        """Gives the oldest call of the process its answer."""
        try:
            succeeded, result = wire.decode(frames)
        except Exception as error:
            succeeded, result = False, WorkerError(f"rank {peer.rank}: its answer cannot be read here: {error}")
        if not succeeded:
            if not self._ended.wait(ECHO_SECONDS):
                self.abort(result)
            return
        with self._state:
            if self._ended_by is not None:
                return
            waiting = peer.waiting.popleft()
        waiting.reply.set_result(result)

    def _end(self, error: WhetError) -> list[_Waiting] | None:
        """Lets no further call in, and takes away the calls under way; None if the end came before."""
        with self._state:
            if self._ended_by is not None:
                return None
            self._ended_by = error
            waiting = [each for peer in self._peers for each in peer.waiting]
            for peer in self._peers:
                peer.waiting.clear()
        self._ended.set()
        return waiting

    def _finish(self, waiting: Sequence[_Waiting], error: WhetError, seconds: float) -> None:
        """Waits until every process is gone, kills what is left, then fails the calls under way."""
        until = time.monotonic() + seconds
        for peer in self._peers:
            peer.process.join(max(0.0, until - time.monotonic()))
            if peer.process.is_alive():
                peer.process.kill()
                peer.process.join(KILL_SECONDS)
        for each in waiting:
            each.reply.set_exception(error)

    def _death(self, peer: _Peer) -> WorkerError:
        """The error that says how the process ended and what it was doing."""
        peer.process.join(ECHO_SECONDS)
        with self._state:
            oldest = peer.waiting[0] if peer.waiting else None
        code = peer.process.exitcode
        end = f"with exit code {code}" if code is None or code >= 0 else f"by {signal.Signals(-code).name}"
        if oldest is None:
            return WorkerError(f"rank {peer.rank} died {end} between two calls")
        hint = "; what it wrote to stderr says why"
        if code == -signal.SIGKILL:
            hint = "; if nobody killed it, the machine ran out of memory"
        elif oldest.method == BUILD:
            hint += '. A script that launches workers needs `if __name__ == "__main__":` around what it runs'
        return WorkerError(f"{oldest.role} rank {peer.rank} died {end} in {oldest.method}{hint}")


def _store(deadline_seconds: float) -> TCPStore:
    """Where the processes find each other: on the loopback address alone, and on a port that nobody can take first."""
    listener = socket.create_server((LOOPBACK, 0))
    return TCPStore(
        LOOPBACK,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=deadline_seconds),
        master_listen_fd=listener.detach(),
    )


def _start_peer(rank: int, pool: ResourcePool, store_port: int, deadline_seconds: float) -> _Peer:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    rendezvous = Rendezvous(rank, pool.processes, pool.threads_per_process, store_port, os.getpid(), deadline_seconds)
    process = multiprocessing.get_context("spawn").Process(
        target=host, args=(theirs, rendezvous), daemon=True, name=f"whet-rank-{rank}"
    )
    with theirs:
        process.start()
    ours.settimeout(deadline_seconds)
    return _Peer(rank, process, ours)
