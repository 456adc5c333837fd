# SPDX-License-Identifier: Apache-2.0
"""The backends, and `controller_workers` importable here, and so in worker processes, which take over `sys.path`."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from whet.config.cluster import ClusterConfig
from whet.controller.launch import launch
from whet.controller.worker_group import WorkerGroup

sys.path.insert(0, str(Path(__file__).parent))

Launch = Callable[..., dict[str, WorkerGroup]]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A small Ray on this machine, one for all tests."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
    from whet.controller.ray.session import authenticated

    with authenticated(starts=True):  # writes no token for every later Ray of this user
        ray.init("local", num_cpus=8, object_store_memory=400 * 2**20, include_dashboard=False, log_to_driver=False)
        yield ray
        ray.shutdown()


@pytest.fixture(scope="session")
def launch_on(request: pytest.FixtureRequest) -> Callable[[str], Launch]:
    """A launch of specs on pools, by the backend's name."""

    def choose(backend: str) -> Launch:
        if backend == "local":
            return partial(launch, deadline_seconds=180)
        request.getfixturevalue("ray_cluster")
        return partial(launch, deadline_seconds=180, on_ray=ClusterConfig(backend="ray", deadline_seconds=180))

    return choose
