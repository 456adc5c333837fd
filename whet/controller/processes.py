# SPDX-License-Identifier: Apache-2.0
"""Worker processes on this machine, over socket pairs: a thread of the caller takes the answers of each."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import SpawnProcess

from whet import devices
from whet.controller import wire
from whet.controller.host import host
from whet.controller.hosted import BUILD, LOOPBACK, Seat, open_store
from whet.controller.remote import Peer, RemoteTransport, Waiting
from whet.controller.resource_pool import ResourcePool
from whet.errors import DeadlineError, LostWorkerError

log = logging.getLogger(__name__)
CLOSE_SECONDS = 10.0  # for workers to close in, before their processes are killed
KILL_SECONDS = 5.0  # for the kernel to end a killed process in
SOCKET_BYTES = 1 << 20  # buffered by the kernel: 1.6 times the throughput of Linux's default


@dataclass(frozen=True, kw_only=True, eq=False)
class _Process(Peer):
    process: SpawnProcess
    socket: socket.socket


class ProcessTransport(RemoteTransport[_Process]):
    """The transport to worker processes of all pools of a launch."""

    def __init__(self, pools: Sequence[ResourcePool], deadline_seconds: float) -> None:
        super().__init__(deadline_seconds)
        self._store = open_store(LOOPBACK, deadline_seconds)
        everyone = [(pool, rank) for pool in pools for rank in range(pool.processes)]
        found = devices.count()
        if 0 < found < len(everyone):
            log.warning(
                "%d processes and %d accelerators: none takes one, all compute on the host", len(everyone), found
            )
        for number, (pool, rank) in enumerate(everyone):
            seat = Seat(
                pool=pool.name,
                rank=rank,
                world_size=pool.processes,
                device_index=number if found >= len(everyone) else None,
                processes_here=len(everyone),
                store=(LOOPBACK, self._store.port),
                address=LOOPBACK,
                deadline_seconds=deadline_seconds,
            )
            self.peers.append(_start(pool, seat))
        for peer in self.peers:
            threading.Thread(target=self._receive, args=(peer,), daemon=True, name=peer.process.name).start()

    def prepare(self, frames: list[wire.Frame]) -> list[wire.Frame]:
        """The frames themselves."""
        return frames

    def hand_over(self, peer: _Process, waiting: Waiting, header: bytes, payload: list[wire.Frame]) -> None:
        """Writes header and payload to the socket."""
        try:
            wire.send(peer.socket, [header, *payload])
        except TimeoutError:
            self.abort(
                DeadlineError(
                    f"{peer.name(waiting.role)} did not take the arguments of {waiting.method} within "
                    f"{self.deadline_seconds:g} s; its processes were ended"
                )
            )
        except OSError:
            self.abort(self._death(peer))

    def end_processes(self, *, is_orderly: bool) -> None:
        """Says that no more calls come, or kills; then kills what is left."""
        for peer in self.peers:
            if is_orderly:
                with contextlib.suppress(OSError):
                    peer.socket.shutdown(socket.SHUT_WR)
            else:
                peer.process.kill()
        until = time.monotonic() + (CLOSE_SECONDS if is_orderly else KILL_SECONDS)
        for peer in self.peers:
            peer.process.join(max(0.0, until - time.monotonic()))
            if peer.process.is_alive():
                peer.process.kill()
                peer.process.join(KILL_SECONDS)

    def _receive(self, peer: _Process) -> None:
        with peer.socket:
            while True:
                ready = connection.wait([peer.socket, peer.process.sentinel])
                try:
                    if peer.socket not in ready:
                        raise EOFError
                    frames = wire.receive(peer.socket)
                except (EOFError, OSError):
                    if not self.ended.is_set():
                        self.abort(self._death(peer))
                    return
                self.settle(peer, frames)

    def _death(self, peer: _Process) -> LostWorkerError:
        """The error that says how the process ended and what it was doing."""
        peer.process.join(self.ECHO_SECONDS)
        oldest = self.oldest(peer)
        code = peer.process.exitcode
        end = f"with exit code {code}" if code is None or code >= 0 else f"by {signal.Signals(-code).name}"
        if oldest is None:
            return LostWorkerError(f"{peer.name()} died {end} between two calls")
        hint = "; what it wrote to stderr says why"
        if code == -signal.SIGKILL:
            hint = "; if nobody killed it, the machine ran out of memory"
        elif oldest.method == BUILD:
            hint += '. A script that launches workers needs `if __name__ == "__main__":` around what it runs'
        return LostWorkerError(f"{peer.name(oldest.role)} died {end} in {oldest.method}{hint}")


def _start(pool: ResourcePool, seat: Seat) -> _Process:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    process = multiprocessing.get_context("spawn").Process(
        target=host, args=(theirs, seat, os.getpid()), daemon=True, name=f"whet-{pool.name}-rank-{seat.rank}"
    )
    with theirs:
        process.start()
    ours.settimeout(seat.deadline_seconds)
    return _Process(pool=pool, rank=seat.rank, process=process, socket=ours)
