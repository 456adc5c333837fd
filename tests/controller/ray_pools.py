# SPDX-License-Identifier: Apache-2.0
"""A program that tests/controller/test_ray_pools.py starts: several nodes of Ray on this machine, with pretended GPUs.

Ray counts the GPUs that a node is said to have, and gives each actor the numbers of its own. In the actors, which
import this program, torch finds the device of tests/pretend_gpu.py as the only one: what it computes is real, and a
tensor in the wrong place is an error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

from tests import pretend_gpu
from whet.config import TrainConfig, load_config
from whet.config.cluster import ClusterConfig
from whet.controller.dispatch import register
from whet.controller.launch import launch_roles
from whet.controller.local_workers import LocalWorkers
from whet.controller.worker import Worker, WorkerSpec
from whet.trainers import build

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(4)]


def pretend() -> None:
    """Lets torch find a device in this process, in whichever thread a worker computes."""
    context = pretend_gpu.present()
    context.__enter__()
    torch.accelerator.set_device_index = lambda _: None  # type: ignore[assignment]
    for name in ("__init__", "serve", "close"):
        setattr(LocalWorkers, name, _everywhere(vars(LocalWorkers)[name]))


def _everywhere(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with pretend_gpu.Everywhere():
            return method(*args, **kwargs)

    return call


class Where(Worker):
    """Says where it is."""

    is_replica = True  # no process group on the pretended device

    @register()
    def where(self) -> tuple[int, str, str, str, int]:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if self.device.type != "cpu" else ""
        node = ray.get_runtime_context().get_node_id()
        return self.rank, node, visible, self.device.type, torch.get_num_threads()

    @register()
    def fall(self) -> None:
        os._exit(3)


def found(cluster: dict[str, Any], address: str, lost: str | None = None) -> dict[str, Any]:
    """The places of the ranks of a placement: the worker's answers by role; the answers of `lost` after its rank 0 was
    lost."""
    config = ClusterConfig.model_validate({"backend": "ray", "address": address, "deadline_seconds": 250, **cluster})
    roles = [role for pool in config.pools.values() for role in pool.roles]
    groups = launch_roles([WorkerSpec(role, Where) for role in roles], config)
    answers = {role: groups[role].where() for role in roles}
    if lost is not None:
        try:
            groups[lost].start_on(0, "fall").result()
        except Exception as error:
            answers["error"] = type(error).__name__
        groups[lost]._transport.start_again(lost, 0).result()
        answers[f"{lost} again"] = [groups[lost].start_on(0, "where").result()]
    next(iter(groups.values())).close()
    return answers


def train(values: dict[str, Any], address: str | None) -> list[dict[str, Any]]:
    """The metrics of a run."""
    config = load_config(TrainConfig, None, {**values, "cluster.address": address}, given={"data"}).config
    run = build.train(config, data=ROWS)
    return [{key: value for key, value in step.items() if not key.startswith("time/")} for step in run.history]


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    nodes = Cluster(shutdown_at_exit=True)
    for cpus, gpus in asked["nodes"]:
        nodes.add_node(num_cpus=cpus, num_gpus=gpus, include_dashboard=False, object_store_memory=100 * 2**20)
    function = {"found": found, "train": train}[asked["function"]]
    result = function(**asked["arguments"], address=nodes.address)
    sys.stdout.write(json.dumps({"result": result}) + "\n")
    sys.stdout.flush()
    nodes.shutdown()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # in an actor
    pretend()
