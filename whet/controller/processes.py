# SPDX-License-Identifier: Apache-2.0
"""Worker processes on this machine, over socket pairs. A thread of the caller receives the replies of each."""

from __future__ import annotations

import contextlib
import logging
import pickle
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection

from whet import devices
from whet.controller import wire
from whet.controller.local_workers import BUILD, LOOPBACK, RankSpec
from whet.controller.remote import OpenCall, Peer, RemoteTransport
from whet.controller.worker import ResourcePool, ranks_of
from whet.controller.worker_group import RAISE_DEADLINE
from whet.controller.worker_process import PUT_MAIN, SOCKET_BYTES, main_module
from whet.errors import DeadlineError, LostWorkerError, WorkerError
from whet.processes import frames
from whet.processes.fork_server import Child, ForkServer, exit_text

log = logging.getLogger(__name__)
CLOSE_SECONDS = 10.0  # for workers to close before their processes are killed


@dataclass(frozen=True, kw_only=True, eq=False)
class _Process(Peer):
    child: Child
    spec: RankSpec

    @property
    def socket(self) -> socket.socket:
        return self.child.connection


class ProcessTransport(RemoteTransport[_Process]):
    """The transport to worker processes of all pools of a launch."""

    def __init__(self, pools: Sequence[ResourcePool], deadline_seconds: float) -> None:
        super().__init__(deadline_seconds)
        prepare, main = "whet.controller.worker_process:prepare", pickle.dumps(main_module())
        self._server = ForkServer(prepare, main, stdout=None, name="ranks")
        self._store = devices.open_store(LOOPBACK, deadline_seconds)
        ranks, wanted = ranks_of(pools)
        found = devices.count()
        if 0 < found < wanted:
            log.warning("%d processes for %d accelerators: all processes compute on the host", wanted, found)
        for pool, rank, first in ranks:
            spec = RankSpec(
                pool=pool,
                rank=rank,
                device_index=first if found >= wanted else None,
                devices_here=wanted,
                store=(LOOPBACK, self._store.port),
                address=LOOPBACK,
                deadline_seconds=deadline_seconds,
            )
            self.peers.append(self._spawn(spec))
        for peer in self.peers:
            self._listen(peer)

    def open(self, lost: _Process) -> _Process:
        return self._listen(self._spawn(lost.spec))

    def end_process(self, peer: _Process) -> None:
        """Kills the process and all that it started."""
        with contextlib.suppress(OSError):
            peer.socket.shutdown(socket.SHUT_RDWR)  # ends the thread that reads from it
        self._server.kill(peer.child)

    def prepare(self, frames: list[wire.Frame]) -> list[wire.Frame]:
        """Returns the frames unchanged."""
        return frames

    def start_call(self, peer: _Process, call: OpenCall, header: bytes, payload: list[wire.Frame]) -> None:
        """Writes header and payload to the socket."""
        try:
            frames.send(peer.socket, call.number, [header, *payload])
        except TimeoutError:
            found = f"did not take its arguments within {self.deadline_seconds:g} s"
            place = f"{peer.name(call.role)}, {call.method}"
            self.lose(peer, DeadlineError(place, found, change=RAISE_DEADLINE))
        except OSError:
            self.lose(peer, self._death(peer))

    def end_processes(self, *, is_orderly: bool) -> None:
        """Closes the sending side and waits where `is_orderly`; then kills the processes that are left."""
        until = time.monotonic() + CLOSE_SECONDS
        running = [peer for peer in self.peers if is_orderly and peer not in self._losses]
        for peer in running:
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_WR)
        for peer in running:
            self._server.wait(peer.child, until - time.monotonic())
        self._server.close()

    def _spawn(self, spec: RankSpec) -> _Process:
        peer = _Process(pool=spec.pool, rank=spec.rank, child=self._server.spawn(Child), spec=spec)
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        peer.socket.settimeout(self.deadline_seconds)
        frames.send(peer.socket, 0, [pickle.dumps(spec)])
        return peer

    def _listen(self, peer: _Process) -> _Process:
        threading.Thread(target=self._receive, args=(peer,), daemon=True, name=peer.name()).start()
        return peer

    def _receive(self, peer: _Process) -> None:
        with peer.socket:
            while True:
                try:
                    if peer.socket not in connection.wait([peer.socket, self._server.fileno()]):
                        self._server.read()
                        if peer.child.exit_code is None:
                            continue
                        raise EOFError  # a process that it started may hold the connection open
                    number, reply = wire.receive(peer.socket)
                except (EOFError, OSError, ValueError):  # ValueError: the launch has ended
                    if not self.ended.is_set() and peer not in self._losses:
                        self.lose(peer, self._death(peer))
                    return
                except frames.BrokenMessageError:
                    found = "wrote bytes that are no reply into its connection"
                    self.abort(WorkerError(peer.name(), found, "code that leaves the descriptors of others alone"))
                    return
                self.complete(peer, reply, number)

    def _death(self, peer: _Process) -> LostWorkerError:
        self._server.wait(peer.child, self.ECHO_SECONDS)
        oldest, code = self.oldest(peer), peer.child.exit_code
        reason, change = "its connection was closed" if code is None else exit_text(code), ""
        if oldest is not None and code != -signal.SIGKILL:
            change = "read its output on stderr for the cause"
            if oldest.method == BUILD:
                change += f", and {PUT_MAIN} that launches workers"
        return self.death(peer, oldest, reason, change=change)
