# SPDX-License-Identifier: Apache-2.0
"""Workers where the config says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from whet.config.cluster import ClusterConfig
from whet.controller.local import SameProcess
from whet.controller.processes import ProcessTransport
from whet.controller.remote import RemoteTransport
from whet.controller.resource_pool import ResourcePool, hosts_of, pools_of
from whet.controller.worker import WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.errors import WorkerError
from whet.metrics import phase


def launch_roles(specs: Sequence[WorkerSpec], cluster: ClusterConfig) -> dict[str, WorkerGroup]:
    """A group for each spec, by role, on the pools and the backend of the config.  Raises: as `launch`."""
    on_ray = cluster if cluster.backend == "ray" else None
    return launch(specs, pools_of(cluster, specs), cluster.deadline_seconds, on_ray)


@phase("loading models")
def launch(
    specs: Sequence[WorkerSpec],
    pools: ResourcePool | Sequence[ResourcePool],
    deadline_seconds: float,
    on_ray: ClusterConfig | None = None,
) -> dict[str, WorkerGroup]:
    """A group for each spec, by role. Each process of a pool hosts a worker of every role of the pool, built in the
    order given.

    One pool of one process on this machine is this process: calls are direct, arguments are handed over as they are,
    and no deadline can end them. All others are started anew: each imports the caller's main module, so a script needs
    `if __name__ == "__main__":`. There `deadline_seconds` bounds the start, every collective and every wait for a call.
    Nothing listens beyond the loopback address. On Ray a process is an actor, and ranks fill one node after the other,
    pool by pool; `cluster.nnodes` nodes get as many each. The processes end with `close`, with the first failure, and
    with this process, however it ends, and so does whatever they started.

    Raises: WorkerError or the WhetError that a worker's constructor raised; DeadlineError; ConfigError.
    """
    pools = hosts_of(specs, [pools] if isinstance(pools, ResourcePool) else pools)
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
        return {
            spec.role: WorkerGroup(spec.role, spec.cls, layouts[spec.role], transport, deadline_seconds)
            for spec in specs
        }
    except WorkerError:  # layouts that do not fit
        transport.close()
        raise
