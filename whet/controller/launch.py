# SPDX-License-Identifier: Apache-2.0
"""Launch of workers: in this process, in processes of this machine, or on Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from whet.config.cluster import ClusterConfig
from whet.controller.dispatch import Arguments
from whet.controller.local_workers import BUILD, LocalWorkers
from whet.controller.processes import ProcessTransport
from whet.controller.remote import RemoteTransport
from whet.controller.worker import Layout, ResourcePool, WorkerSpec, pools_of, with_roles
from whet.controller.worker_group import Reply, Transport, WorkerGroup, closed_error, stopped
from whet.errors import WhetError, WorkerError
from whet.phases import phase


def launch_roles(specs: Sequence[WorkerSpec], cluster: ClusterConfig) -> dict[str, WorkerGroup]:
    """Launches a group for each spec, by role, on the pools and the backend of the config.  Raises: as `launch`."""
    on_ray = cluster if cluster.backend == "ray" else None
    return launch(specs, pools_of(cluster, specs), cluster.deadline_seconds, on_ray)


@phase("loading models")
def launch(
    specs: Sequence[WorkerSpec],
    pools: ResourcePool | Sequence[ResourcePool],
    deadline_seconds: float,
    on_ray: ClusterConfig | None = None,
) -> dict[str, WorkerGroup]:
    """Launches a group for each spec.  Returns them by role. Each process of a pool hosts a worker of every role of the
    pool, built in the order of `specs`.

    A single pool of one process without Ray is this process: calls are direct, arguments are passed by reference, and
    there are no deadlines. Otherwise new processes are started. Each imports the caller's main module, so a script
    needs `if __name__ == "__main__":`. `deadline_seconds` bounds the start, every collective and every wait for a call.
    Sockets listen on the loopback address only. On Ray a process is an actor; ranks fill one node after the other, pool
    by pool, with the same number on each of the `cluster.nnodes` nodes. The processes, and all that they started, end
    with `close`, with the first failure, and with this process, even after kill -9.

    Raises: WorkerError or the WhetError that a worker's constructor raised; DeadlineError; ConfigError.
    """
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
    """The transport to workers in this process: a direct call."""

    def __init__(self) -> None:
        self.workers = LocalWorkers()
        self._closed_by: WhetError | None = None
        self.ended = threading.Event()

    def build(self, specs: Sequence[WorkerSpec]) -> dict[str, list[Layout]]:
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
