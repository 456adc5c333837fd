# SPDX-License-Identifier: Apache-2.0
"""An engine on the devices of several training ranks: one for them all, in turns with all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))
import rollout_conformance as requests
from lent_engine import Looking, Noting

from tests.raising import raises
from whet.config import TrainConfig
from whet.controller.launch import launch
from whet.controller.worker import Host, Placement, ResourcePool, WorkerSpec
from whet.controller.worker_group import WorkerGroup
from whet.errors import ConfigError
from whet.models.load import load_policy
from whet.roles.rollout_worker import Lent, Modes, RolloutWorker
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Span, generate
from whet.rollout.replicas import Replicas
from whet.trainers.build import plan, worker_specs
from whet.weight_sync.routes import weight_sync

MakeConfig = Callable[..., TrainConfig]
SHARED = {"weights_dir": "/tmp", "weight_transfer": "file", "restarts": 0}
ENGINE = f"{Path(__file__).parent / 'lent_engine.py'}:Together"


def together(train_config: MakeConfig, processes: int, size: int, folder: Path, **changes: Any) -> TrainConfig:
    options = {"folder": str(folder), "tensor_parallel_size": size, **SHARED}
    options |= {name: changes.pop(name) for name in SHARED if name in changes}
    engine = {"rollout.engine.name": ENGINE, "rollout.engine.options": options, "actor.engine.name": "fsdp"}
    return train_config({**engine, "cluster.processes": processes, "rollout.free_cache_engine": True, **changes})


@pytest.fixture
def groups(train_config: MakeConfig, tmp_path: Path) -> Iterator[dict[str, WorkerGroup]]:
    """Four training ranks with two engines."""
    config = together(train_config, 4, 2, tmp_path)
    specs = {spec.role: spec for spec in worker_specs(config, plan(config), 1)}
    made = [WorkerSpec("actor", Noting, specs["actor"].args), WorkerSpec("rollout", Looking, specs["rollout"].args)]
    started = launch(made, ResourcePool(4), 120.0)
    yield started
    started["actor"].close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_ranks_have_two_engines(groups: dict[str, WorkerGroup], model_folder: Path, tmp_path: Path) -> None:
    actor, rollout = groups["actor"], groups["rollout"]
    assert (tmp_path / "notes").read_text().splitlines() == ["begins on 2 devices"] * 2
    assert rollout.reporting == [0, 2] and rollout.dp_size == 2
    sync = weight_sync(actor, rollout, "float32", 60.0)
    actor.change()
    engine = Replicas(rollout, 4, gathers=True, weight_sync=sync)
    engine.sync(1)
    made = requests.requests(groups=8, n=4)
    module = load_policy(model_folder)
    for weight in module.parameters():
        weight.data.mul_(1.25)
    alone = NativeEngine()
    alone.attach(module, 1)
    assert generate(engine, made) == generate(alone, made)
    assert [status.version for status in rollout.status()] == [1] * 4
    # Nobody takes a device before all have left it.
    actor.note_in(str(tmp_path))
    (tmp_path / "notes").unlink()
    with Modes(rollout).rollout_mode():
        assert (tmp_path / "notes").read_text().splitlines() == ["left"] * 4 + ["wakes"] * 2
        (tmp_path / "notes").unlink()
    assert (tmp_path / "notes").read_text().splitlines() == ["sleeps"] * 2 + ["slept"] * 2 + ["back"] * 4


def test_a_rank_without_an_engine_reads_all_weights(train_config: MakeConfig, tmp_path: Path) -> None:
    config = together(train_config, 2, 2, tmp_path)
    [args] = [spec.args for spec in worker_specs(config, plan(config), 1) if spec.role == "rollout"]
    worker = RolloutWorker(Placement("rollout", 1, 2), *args)
    assert isinstance(worker.engine, Lent) and not (tmp_path / "notes").exists()
    assert (worker.dp_rank, worker.dp_size, worker.is_reporting) == (0, 1, False)
    left = iter([("a", load_policy(str(config.model.path)).lm_head.weight)])
    worker.engine.load(left, 3)
    assert next(left, None) is None and worker.status().version == 3
    worker.close()


def ranked(config: TrainConfig, hosts: Sequence[Host], rank: int) -> Looking:
    """The worker of a rank on Ray."""
    [args] = [spec.args for spec in worker_specs(config, plan(config), 1) if spec.role == "rollout"]
    return Looking(Placement("rollout", rank, len(hosts), hosts=hosts), *args)


def test_ray_shows_the_first_rank_the_devices_of_all(
    train_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    hosts = [Host("node", "10.0.0.1", device) for device in ("7", "0", "5", "3")]
    worker = ranked(together(train_config, 4, 2, tmp_path), hosts, 2)
    assert worker.visible() == "5,3" and (worker.engine.devices, worker.engine.span) == (2, None)
    worker.close()


def test_a_server_on_two_nodes_has_a_part_on_each(
    train_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 4 to 7 of two nodes with two devices each: 4 has the front, 6 the part of its node, 5 and 7 nothing."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    hosts = [Host(f"node {rank // 2}", f"10.0.0.{rank // 2}", str(rank % 2)) for rank in range(8)]
    config = together(train_config, 8, 4, tmp_path, **{"cluster.backend": "ray", "cluster.nnodes": 4})
    workers = [ranked(config, hosts, rank) for rank in (4, 5, 6, 7)]
    front, part = Span(2, 0, "10.0.0.2", 28_504), Span(2, 1, "10.0.0.2", 28_504)
    parts = [None if isinstance(worker.engine, Lent) else worker.engine for worker in workers]
    assert parts[1:] == [None] * 3 and parts[0].span == front and parts[0].devices == 4
    behind = [worker.engine._part for worker in workers[1:]]
    assert behind[0] is None and behind[1].span == part and behind[2] is None
    assert [worker.is_reporting for worker in workers] == [True, False, False, False]
    assert workers[2].visible() == "0,1"
    for worker in workers:
        worker.close()


@pytest.mark.parametrize(
    ("processes", "size", "found"),
    [(4, 3, 3), (2, 4, 4), (6, 4, 4)],
)
def test_ranks_that_engines_cannot_share(
    processes: int, size: int, found: int, train_config: MakeConfig, tmp_path: Path
) -> None:
    with raises(ConfigError, "rollout.engine.options.tensor_parallel_size", found=found):
        together(train_config, processes, size, tmp_path)


def test_stages_of_a_server_count_as_devices(train_config: MakeConfig, tmp_path: Path) -> None:
    """4 devices in each of 2 stages are the 8 of a rank; stages alone do not say how many each has."""
    key, stages = "rollout.engine.options.tensor_parallel_size", {"server": {"pipeline_parallel_size": 2}}
    with raises(ConfigError, key, found=None):
        train_config({"rollout.engine.name": "vllm", "rollout.engine.options": stages, "actor.engine.name": "fsdp"})
    pools = {"train": {"processes": 8}, "sample": {"processes": 2, "devices": 8, "roles": ["rollout"]}}
    options = {**stages, "tensor_parallel_size": 4}
    sampling = {"rollout.engine.name": "vllm", "rollout.engine.options": options, "actor.engine.name": "fsdp"}
    cluster = train_config({**sampling, "cluster.placement": pools}).cluster
    assert (cluster.replica_ranks(options), cluster.replica_devices(options)) == (1, 8)


def test_an_engine_is_on_a_node_or_on_whole_ones(train_config: MakeConfig, tmp_path: Path) -> None:
    nodes, size = {"cluster.backend": "ray", "cluster.nnodes": 2}, "rollout.engine.options.tensor_parallel_size"
    assert together(train_config, 4, 2, tmp_path, **nodes).cluster.replica_ranks({"tensor_parallel_size": 2}) == 2
    with raises(ConfigError, size, found=3):  # of 6 ranks, 3 to a node; 2 to a node cross it
        together(train_config, 12, 3, tmp_path, **{**nodes, "cluster.nnodes": 3})
    assert together(train_config, 4, 4, tmp_path, **nodes).cluster.replica_devices({"tensor_parallel_size": 4}) == 4


@pytest.mark.parametrize(
    ("option", "value"), [("weights_dir", None), ("weight_transfer", "ipc"), ("restarts", 3)], ids=str
)
def test_a_server_on_several_nodes_needs_a_shared_folder(
    option: str, value: object, train_config: MakeConfig, tmp_path: Path
) -> None:
    with raises(ConfigError, f"rollout.engine.options.{option}", found=value):
        together(train_config, 4, 4, tmp_path, **{"cluster.backend": "ray", "cluster.nnodes": 2}, **{option: value})
