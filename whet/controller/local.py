# SPDX-License-Identifier: Apache-2.0
"""Workers on this machine: in this process, or in processes of their own that talk over gloo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from whet.controller.dispatch import Arguments
from whet.controller.processes import ProcessTransport
from whet.controller.resource_pool import ResourcePool
from whet.controller.worker import Layout, Placement, Worker, WorkerSpec
from whet.controller.worker_group import Reply, Transport, WorkerGroup, closed_error, describe
from whet.errors import ConfigError, WhetError, WorkerError


def launch(specs: Sequence[WorkerSpec], pool: ResourcePool, deadline_seconds: float) -> dict[str, WorkerGroup]:
    """A group for each spec, by role. Each process of the pool hosts a worker of every role, built in the order given.

    A pool of one process is this one: calls are direct, arguments are handed over as they are, and no deadline can end
    them. More are started anew ("spawn"): each imports the caller's main module, so a script needs
    `if __name__ == "__main__":`. There `deadline_seconds` bounds the start, every collective and every wait for a call.
    Nothing listens beyond the loopback address. The processes end with `close`, with the first failure, and with this
    process, however it ends; they are daemons, so workers in them can start subprocesses but no multiprocessing ones.

    Raises: WorkerError or the WhetError that a worker's constructor raised; DeadlineError; ConfigError.
    """
    roles = [spec.role for spec in specs]
    if not specs or len(set(roles)) < len(roles):
        raise ConfigError(f"launch of roles {roles}: expected at least one, and each once")
    transport: Transport
    if pool.processes == 1:
        transport, layouts = _build_here(specs)
    else:
        transport, layouts = ProcessTransport.start(specs, pool, deadline_seconds)
    try:
        return {
            spec.role: WorkerGroup(spec.role, spec.cls, layouts[spec.role], transport, deadline_seconds)
            for spec in specs
        }
    except WorkerError:
        transport.close()
        raise


def _build_here(specs: Sequence[WorkerSpec]) -> tuple[Transport, dict[str, list[Layout]]]:
    workers: dict[str, Worker] = {}
    transport = _SameProcess(workers)
    for spec in specs:
        try:
            workers[spec.role] = spec.build(Placement(spec.role, neighbours=workers))
        except Exception as error:
            transport.close()
            described = describe(error, spec.role, 0, "__init__")
            raise described from described.__cause__
    return transport, {role: [Layout.of(worker)] for role, worker in workers.items()}


class _SameProcess:
    """The transport to workers in this process: a call is a call."""

    def __init__(self, workers: dict[str, Worker]) -> None:
        self._workers = workers
        self._closed_by: str | None = None

    def send(self, role: str, method: str, arguments: Mapping[int, Arguments]) -> dict[int, Reply]:
        if self._closed_by is not None:
            raise closed_error(role, method, self._closed_by)
        return {rank: self._reply(role, method, given) for rank, given in arguments.items()}

    def _reply(self, role: str, method: str, arguments: Arguments) -> Reply:
        reply: Reply = Future()
        try:
            reply.set_result(getattr(self._workers[role], method)(*arguments.args, **arguments.kwargs))
        except Exception as error:
            described = describe(error, role, 0, method)
            self.abort(described)
            reply.set_exception(described)
        return reply

    def abort(self, error: WhetError) -> None:
        self._closed_by = self._closed_by or str(error)

    def close(self) -> None:
        self._closed_by = self._closed_by or "close() was called"
        while self._workers:  # the last one built first: it may use the others
            self._workers.popitem()[1].close()
