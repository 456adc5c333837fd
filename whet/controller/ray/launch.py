# SPDX-License-Identifier: Apache-2.0
"""Workers on a Ray cluster."""

from __future__ import annotations

from collections.abc import Sequence

from whet.config.cluster import ClusterConfig
from whet.controller.ray import actor
from whet.controller.ray.transport import RayTransport
from whet.controller.resource_pool import ResourcePool, hosts_of
from whet.controller.worker import WorkerSpec
from whet.controller.worker_group import WorkerGroup, groups_of
from whet.errors import WorkerError
from whet.metrics import phase


@phase("loading models")
def launch(
    specs: Sequence[WorkerSpec], pools: Sequence[ResourcePool], cluster: ClusterConfig
) -> dict[str, WorkerGroup]:
    """A group for each spec, by role. Each process of a pool is an actor, and hosts a worker of every role of the pool.

    Ranks fill one node after the other, pool by pool; `cluster.nnodes` nodes get as many each. They end with `close`,
    with the first failure, and with this process, however it ends.

    Raises: WorkerError or the WhetError that a worker's constructor raised; DeadlineError; ConfigError.
    """
    if actor.is_rank:
        raise WorkerError(
            "workers are launched inside of a worker, which imports the script that was started: it needs "
            '`if __name__ == "__main__":` around what it runs'
        )
    pools = hosts_of(specs, pools)
    transport = RayTransport(pools, cluster)
    return groups_of(specs, transport.build(specs), transport, cluster.deadline_seconds)
