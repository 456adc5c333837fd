# SPDX-License-Identifier: Apache-2.0
"""Weights of every mesh of two training processes in a server, bit for bit equal to the Hugging Face export."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import server_conformance as servers

sys.path.insert(0, str(Path(__file__).parents[2] / "engines"))
sys.path.insert(0, str(Path(__file__).parents[2] / "trainers"))
sys.path.insert(0, str(Path(__file__).parents[2] / "weight_sync"))
import engine_conformance as suite
from mesh_cases import Sizes, fsdp, named
from mesh_workers import Sender
from test_mesh import folders as folders
from test_meshes import exported

from whet.config.schema import ModelConfig, RolloutConfig
from whet.controller.launch import launch
from whet.controller.worker import ResourcePool, WorkerSpec
from whet.plugins.inference.servers import engine as engine_module
from whet.plugins.inference.servers.engine import ServerEngine
from whet.plugins.inference.servers.weights import in_parts
from whet.roles.rollout_worker import RolloutWorker
from whet.weight_sync.routes import BetweenPools

SECONDS = 300.0
MESHES: dict[str, list[Sizes]] = {
    "qwen3 untied": [{}, {"replicate": 2}, {"context": 2}, {"tensor": 2}, {"pipeline": 2}],
    "qwen3_moe untied": [{}, {"expert": 2}, {"tensor": 2}, {"pipeline": 2}],
}
Differing = Callable[[ServerEngine, Path], list[str]]  # names of weights that are not those of a folder


def check_meshes(
    arch: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, differing: Differing
) -> None:
    """Syncs the server from each mesh: whole in one file, as a delta in one file, as a delta in parts."""
    monkeypatch.setattr(engine_module, "in_parts", partial(in_parts, part_bytes=2**18))
    roles = {named(sizes): suite.settings(model, fsdp(sizes)) for sizes in MESHES[arch]}
    specs = [WorkerSpec(role, Sender, (each,)) for role, each in roles.items()]
    actors = launch(specs, ResourcePool(2), deadline_seconds=480)
    options = {**servers.SMALL, "weight_delta": True}
    config = RolloutConfig.model_validate({"dtype": "float32", "engine": {"name": engine, "options": options}})
    spec = WorkerSpec("rollout", RolloutWorker, (config, str(model), ModelConfig(path=str(model))))
    rollout = launch([spec], ResourcePool(1), SECONDS)["rollout"]
    try:
        assert rollout.here is not None
        server = rollout.here.by_role["rollout"].engine
        server.ready()
        assert differing(server, model) == []
        version = 0
        for mesh, actor in actors.items():
            sync, sizes = BetweenPools(actor, rollout, "float32", SECONDS), list[int]()
            for way in ("file", "file", "ipc"):
                actor.change_some()
                server.weight_transfer, version = way, version + 1
                folder = tmp_path / f"{mesh} {version}"
                whole = exported(actor, model, folder)
                assert differing(server, folder), mesh
                sync(version)
                assert differing(server, folder) == [], (mesh, version)
                sizes.append(sum(sent for _, sent in actor.counts()))
            assert sizes[0] >= 4 * sum(each.numel() for each in whole.values()) and max(sizes[1:]) < sizes[0] / 4
    finally:
        rollout.close()
        next(iter(actors.values())).close()
