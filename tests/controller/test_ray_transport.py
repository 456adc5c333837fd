# SPDX-License-Identifier: Apache-2.0
"""Features of Ray alone: shared memory, names in its dashboard, a cluster that is too small or missing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from controller_workers import Actor, Rollout

from tests.raising import raises

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
from whet.batch import Batch
from whet.config.cluster import ClusterConfig
from whet.controller.dispatch import Dispatch, register
from whet.controller.launch import launch
from whet.controller.ray.session import connected
from whet.controller.ray.watch import Watch
from whet.controller.worker import ResourcePool, WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.errors import ConfigError, WorkerError

pytestmark = pytest.mark.slow
Launch = Callable[..., dict[str, WorkerGroup]]


class Reader(Actor):
    """Two ranks that share a model, and say where the rows lie that they were given."""

    @property
    def dp_rank(self) -> int:
        return 0

    @property
    def dp_size(self) -> int:
        return 1

    @property
    def is_reporting(self) -> bool:
        return self.rank == 1

    @register(Dispatch.DP_COMPUTE)
    def mapped(self, batch: Batch) -> list[str]:
        """The file that the memory of `x` belongs to, and its place in that file, for each row."""
        pointer = batch["x"].data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, offset, _, _, *file = line.split()
            start, end = (int(each, 16) for each in span.split("-"))
            if start <= pointer < end:
                found = f"{file[0]} {pointer - start + int(offset, 16)}"
        if self.process_group is not None:
            both: list[Any] = [None, None]
            torch.distributed.all_gather_object(both, found, group=self.process_group)
            found = str(len(set(both))) + " " + found
        return [found] * len(batch)


def test_a_shard_lies_once_in_shared_memory_and_is_read_there(launch_on: Callable[[str], Launch]) -> None:
    reader = launch_on("ray")([WorkerSpec("actor", Reader)], [ResourcePool(2)])["actor"]
    found = reader.mapped(Batch.of({"x": torch.arange(200_000).reshape(2, -1)}))
    places, file, _ = found[0].split()
    assert (places, Path(file).name[:6]) == ("1", "plasma")  # both ranks read the same bytes, in Ray's object store
    back = reader.echo(Batch.of({"x": torch.arange(200_000).reshape(2, -1)}))
    reader.close()
    assert back["x"].sum() == 200_000 * 199_999 // 2  # what it returned is still there


def test_rays_dashboard_shows_roles_and_rank(launch_on: Callable[[str], Launch], ray_cluster: Any) -> None:
    specs = [WorkerSpec("actor", Actor), WorkerSpec("rollout", Rollout), WorkerSpec("judge", Actor)]
    pools = [ResourcePool(2, ("actor", "rollout"), "train"), ResourcePool(1, ("judge",), "look")]
    groups = launch_on("ray")(specs, pools)
    named = {each["name"] for each in ray_cluster.util.list_named_actors(all_namespaces=True)}
    assert {"actor, rollout rank 0", "actor, rollout rank 1", "judge rank 0"} <= named
    groups["actor"].close()


def test_a_cluster_that_is_too_small_says_what_it_has(ray_cluster: Any) -> None:
    cluster = ClusterConfig(backend="ray", n_gpus_per_node=2, deadline_seconds=1)
    found = re.compile(r"\(8 CPUs, 0 GPUs\), .*\{'CPU': 8\.0\}")
    expected = re.compile(r"^1 node with 2 CPUs and 2 GPUs .*\b1 s$")
    change = re.compile(r"`ray start --address=\.\.\.`.*cluster\.nnodes and cluster\.n_gpus_per_node$")
    with raises(WorkerError, "Ray cluster", found=found, expected=expected, change=change):
        launch([WorkerSpec("actor", Actor)], [ResourcePool(2)], 1, cluster)


@pytest.mark.parametrize(
    ("address", "key", "found"),
    [
        ("127.0.0.1:9", "Ray cluster at 127.0.0.1:9", r"\(.*refused.*\)"),
        ("head", "cluster.address", "^head$"),
    ],
)
def test_an_address_without_a_cluster(monkeypatch: pytest.MonkeyPatch, address: str, key: str, found: str) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with (
        raises(ConfigError, key, found=re.compile(found)),
        connected(ClusterConfig(backend="ray", address=address)),
    ):
        pass


def test_the_watch_tells_refusal_from_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    import queue
    import socket

    monkeypatch.setattr("whet.controller.ray.watch.PERIOD_SECONDS", 0.05)
    monkeypatch.setattr("whet.controller.ray.watch.CONNECT_SECONDS", 0.2)
    told: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        here = listening.getsockname()
        watch = Watch({"here": here}, lambda *said: told.put(said))
        with pytest.raises(queue.Empty):
            told.get(timeout=0.5)  # it answers
    assert told.get(timeout=5) == ("here", f"no process listens at 127.0.0.1:{here[1]} any more")
    watch.stop()
    Watch({"far": ("192.0.2.77", 9)}, lambda *said: told.put(said))  # an address for documentation: nobody has it
    name, why = told.get(timeout=10)
    assert name == "far"
    assert why.endswith("the machine or the network to it is down")
