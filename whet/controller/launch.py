# SPDX-License-Identifier: Apache-2.0
"""Launch of workers: in this process, in processes of this machine, or on Ray."""

from __future__ import annotations

import contextlib
import logging
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from typing import Any

from whet import devices
from whet.config.cluster import ClusterConfig, devices_of, processors_of, ranks_of
from whet.controller import wire
from whet.controller.dispatch import Arguments
from whet.controller.local_workers import BUILD, LOOPBACK, PUT_MAIN, SOCKET_BYTES, LocalWorkers, RankSpec, main_module
from whet.controller.remote import OpenCall, RemoteTransport, WorkerConnection
from whet.controller.worker import RankLayout, ResourcePool, WorkerSpec, pools_of, with_roles
from whet.controller.worker_group import RAISE_DEADLINE, Reply, Transport, WorkerGroup, closed_error, stopped
from whet.errors import DeadlineError, LostWorkerError, WhetError, WorkerError
from whet.phases import phase
from whet.processes import frames
from whet.processes.fork_server import Child, ForkServer, exit_text

log = logging.getLogger(__name__)
CLOSE_SECONDS = 10.0  # for workers to close before their processes are killed


def launch_roles(specs: Sequence[WorkerSpec], cluster: ClusterConfig) -> dict[str, WorkerGroup]:
    """Launches a group for each spec, on the pools of `cluster` and its backend.  Returns, raises: as `launch`."""
    on_ray = cluster if cluster.backend == "ray" else None
    return launch(specs, pools_of(cluster, specs), cluster.deadline_seconds, on_ray)


@phase("loading models")
def launch(
    specs: Sequence[WorkerSpec],
    pools: ResourcePool | Sequence[ResourcePool],
    deadline_seconds: float,
    on_ray: ClusterConfig | None = None,
) -> dict[str, WorkerGroup]:
    """Launches a worker group for each spec.  Returns the groups by role. Each process of a pool hosts a worker of
    every role of the pool, built in the order of `specs`.

    A single pool of one process without Ray is this process: calls are direct, arguments are passed by reference, and
    there are no deadlines. Otherwise new processes are started. Each imports the caller's main module, so a script
    needs `if __name__ == "__main__":`. `deadline_seconds` bounds the start, every collective and every wait for a call.
    Their sockets listen on the loopback address only. On Ray a process is an actor on the node that `cluster.slots`
    gives. All processes and their children end at `close`, at the first failure and with this process, even by kill -9.

    Raises: WorkerError or the WhetError that a worker's constructor raised; DeadlineError; ConfigError."""
    pools = with_roles(specs, [pools] if isinstance(pools, ResourcePool) else pools)
    transport: SameProcess | RemoteTransport[Any]
    if on_ray is not None:
        from whet.controller.ray.transport import RayTransport

        transport = RayTransport(pools, on_ray)
    elif len(pools) == 1 and pools[0].processes == 1:
        transport = SameProcess()
    else:
        transport = ProcessTransport(pools, deadline_seconds)
    layouts = transport.build(specs)
    try:
        groups = {
            spec.role: WorkerGroup(spec.role, spec.cls, layouts[spec.role], transport, deadline_seconds)
            for spec in specs
        }
    except WorkerError:  # inconsistent layouts
        transport.close()
        raise
    for group in groups.values():
        group.here = transport.workers if isinstance(transport, SameProcess) else None
    return groups


class SameProcess(Transport):
    """The transport to workers in this process. A call is a direct call of the method."""

    def __init__(self) -> None:
        self.workers = LocalWorkers()
        self._closed_by: WhetError | None = None
        self.ended = threading.Event()

    def build(self, specs: Sequence[WorkerSpec]) -> dict[str, list[RankLayout]]:
        """Builds the workers.  Returns their layouts by role."""
        try:
            return {s.role: [self._reply(s.role, BUILD, partial(self.workers.build, s)).result()] for s in specs}
        except BaseException:
            self.close()
            raise

    def send(self, role: str, method: str, arguments: Mapping[int, Arguments]) -> dict[int, Reply]:
        if self._closed_by is not None:
            raise closed_error(role, method, self._closed_by)
        call = getattr(self.workers.by_role[role], method)
        return {rank: self._reply(role, method, partial(call, *a.args, **a.kwargs)) for rank, a in arguments.items()}

    def _reply(self, role: str, method: str, call: Callable[[], Any]) -> Reply:
        reply: Reply = Future()
        try:
            reply.set_result(call())
        except Exception as error:
            described = self.workers.describe(error, role, method)
            self.abort(described)
            reply.set_exception(described)
        return reply

    def abort(self, error: WhetError) -> None:
        self._closed_by = self._closed_by or error
        self.ended.set()

    def close(self) -> None:
        self._closed_by = self._closed_by or stopped("close() was called")
        self.workers.close()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Process(WorkerConnection):
    child: Child
    spec: RankSpec

    @property
    def socket(self) -> socket.socket:
        return self.child.connection


class ProcessTransport(RemoteTransport[_Process]):
    """The transport to worker processes of all pools of a launch."""

    def __init__(self, pools: Sequence[ResourcePool], deadline_seconds: float) -> None:
        super().__init__(deadline_seconds)
        prepare, main = "whet.controller.local_workers:prepare", pickle.dumps(main_module())
        self._server = ForkServer(prepare, main, stdout=None, name="ranks")
        self._store = devices.open_store(LOOPBACK, deadline_seconds)
        slots = ranks_of(pools)
        found, wanted, processors = devices.count(), devices_of(slots).total(), processors_of(slots).total()
        if 0 < found < wanted:
            log.warning("the roles need %d devices, but there are %d: all processes compute on the host", wanted, found)
        for slot in slots:
            spec = RankSpec(
                pool=slot.pool,
                rank=slot.rank,
                device_index=slot.devices[0] if slot.devices and found >= wanted else None,
                devices_here=processors,
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
        """Kills the process and all processes that it started."""
        with contextlib.suppress(OSError):
            peer.socket.shutdown(socket.SHUT_RDWR)  # ends the thread that reads from it
        self._server.kill(peer.child)

    def prepare(self, frames: list[wire.Frame]) -> list[wire.Frame]:
        """Returns the frames unchanged."""
        return frames

    def start_call(self, peer: _Process, call: OpenCall, header: bytes, payload: list[wire.Frame]) -> None:
        """Sends header and payload through the socket. If sending fails, the process counts as lost."""
        try:
            frames.send(peer.socket, call.number, [header, *payload])
        except TimeoutError:
            found = f"did not take its arguments within {self.deadline_seconds:g} s"
            place = f"{peer.name(call.role)}, {call.method}"
            self.lose(peer, DeadlineError(place, found, change=RAISE_DEADLINE))
        except OSError:
            self.lose(peer, self._death(peer))

    def end_processes(self, *, is_orderly: bool) -> None:
        """Kills all processes. If `is_orderly`, first closes this side of each connection and lets the process exit."""
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
                    self.abort(WorkerError(peer.name(), found, "code that writes only to files that it opened itself"))
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
