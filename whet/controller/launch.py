# SPDX-License-Identifier: Apache-2.0
"""Workers where the config says."""

from __future__ import annotations

from collections.abc import Sequence

from whet.config.cluster import ClusterConfig
from whet.controller import local
from whet.controller.resource_pool import pools_of
from whet.controller.worker import WorkerSpec
from whet.controller.worker_group import WorkerGroup


def launch_roles(specs: Sequence[WorkerSpec], cluster: ClusterConfig) -> dict[str, WorkerGroup]:
    """A group for each spec, by role, on the pools and the backend of the config.  Raises: as the backend's launch."""
    pools = pools_of(cluster, specs)
    if cluster.backend == "ray":
        from whet.controller.ray.launch import launch

        return launch(specs, pools, cluster)
    return local.launch(specs, pools, cluster.deadline_seconds)
