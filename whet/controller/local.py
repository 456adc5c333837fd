# SPDX-License-Identifier: Apache-2.0
"""Workers on this machine: in this process, or in processes of their own that talk over gloo or the accelerator's own
collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from whet.controller.dispatch import Arguments
from whet.controller.hosted import BUILD, Hosted
from whet.controller.processes import ProcessTransport
from whet.controller.resource_pool import ResourcePool, hosts_of
from whet.controller.worker import Layout, WorkerSpec
from whet.controller.worker_group import Reply, WorkerGroup, closed_error, groups_of
from whet.errors import WhetError, WorkerError
from whet.metrics import phase


@phase("loading models")
def launch(
    specs: Sequence[WorkerSpec], pools: ResourcePool | Sequence[ResourcePool], deadline_seconds: float
) -> dict[str, WorkerGroup]:
    """A group for each spec, by role. Each process of a pool hosts a worker of every role of the pool, built in the
    order given.

    One pool of one process is this one: calls are direct, arguments are handed over as they are, and no deadline can
    end them. All others are started anew: each imports the caller's main module, so a script needs
    `if __name__ == "__main__":`. There `deadline_seconds` bounds the start, every collective and every wait for a call.
    Nothing listens beyond the loopback address. The processes end with `close`, with the first failure, and with this
    process, however it ends, and so does whatever they started.

    Raises: WorkerError or the WhetError that a worker's constructor raised; DeadlineError; ConfigError.
    """
    pools = hosts_of(specs, [pools] if isinstance(pools, ResourcePool) else pools)
    is_here = len(pools) == 1 and pools[0].processes == 1
    transport = _SameProcess() if is_here else ProcessTransport(pools, deadline_seconds)
    return groups_of(specs, transport.build(specs), transport, deadline_seconds)


class _SameProcess:
    """The transport to workers in this process: a call is a call."""

    def __init__(self) -> None:
        self._workers = Hosted()
        self._closed_by: WhetError | None = None

    def build(self, specs: Sequence[WorkerSpec]) -> dict[str, list[Layout]]:
        try:
            return {spec.role: [self.send(spec.role, BUILD, {0: spec})[0].result()] for spec in specs}
        except BaseException:
            self.close()
            raise

    def send(self, role: str, method: str, arguments: Mapping[int, Arguments | WorkerSpec]) -> dict[int, Reply]:
        if self._closed_by is not None:
            raise closed_error(role, method, self._closed_by)
        return {rank: self._reply(role, method, given) for rank, given in arguments.items()}

    def _reply(self, role: str, method: str, given: Arguments | WorkerSpec) -> Reply:
        reply: Reply = Future()
        try:
            reply.set_result(self._workers.call(role, method, given))
        except Exception as error:
            described = self._workers.describe(error, role, method)
            self.abort(described)
            reply.set_exception(described)
        return reply

    def abort(self, error: WhetError) -> None:
        self._closed_by = self._closed_by or error

    def close(self) -> None:
        self._closed_by = self._closed_by or WorkerError("close() was called")
        self._workers.close()
