# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whet.config import SFTConfig, TrainConfig, load_config
from whet.config.cluster import ClusterConfig
from whet.controller.launch import launch_roles
from whet.controller.worker import Placement, WorkerSpec
from whet.planning.dtypes import with_dtypes
from whet.planning.machine import FreeMemory
from whet.plugins.planner.memory import cache_room, micro_batch_tokens
from whet.roles.rollout_worker import RolloutWorker
from whet.rollout.requirements import CacheRoom
from whet.trainers import build, sft
from whet.trainers.columns import plan

MakeConfig = Callable[..., TrainConfig]
DEVICE = FreeMemory(2**36, "each accelerator")


def given(config: TrainConfig) -> dict[str, Any]:
    """The arguments of a run's workers: tokens of a micro-batch by position, others by name."""
    made = build.worker_specs(config, plan(config), 2, build.setup(config, [16]))
    return {
        each.role: each.kwargs if each.cls is RolloutWorker else each.args[0].max_tokens_per_micro_batch
        for each in made
    }


def test_a_rollout_on_an_accelerator_is_told_its_room_beside_training(
    train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = train_config({"algorithm.kl.where": "loss"})
    assert given(config) == {"actor": None, "ref": None, "rollout": {"cache_room": None}}  # on the host
    monkeypatch.setattr(build, "free_accelerator", lambda cluster: DEVICE)
    wanted = cache_room(replace(build.setup(config, [16]), device=DEVICE))
    assert wanted is not None and wanted.beside > 0
    assert given(config) == {"actor": None, "ref": None, "rollout": {"cache_room": wanted}}
    set_size = train_config({"rollout.engine.options.kv_cache_bytes": 2**20})
    assert given(set_size)["rollout"] == {"cache_room": None}


def test_micro_batches_of_an_accelerator_follow_from_its_memory(
    train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained and read models have their own sizes; a configured size stays."""
    config = train_config({"algorithm.kl.where": "loss", "rollout.engine.options.kv_cache_bytes": 2**20})
    device = replace(DEVICE, total=5 * 2**28)
    monkeypatch.setattr(build, "free_accelerator", lambda cluster: device)
    setup = replace(build.setup(config, [16]), device=device)
    found, wanted = given(config), {name: micro_batch_tokens(setup, name) for name in ("actor", "ref")}
    assert {name: found[name] for name in wanted} == wanted
    assert 512 < wanted["actor"] <= wanted["ref"] < 16_384
    assert given(train_config({"actor.max_tokens_per_micro_batch": 60}))["actor"] == 60


def test_so_do_those_of_supervised_runs(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"model.path": str(model_folder), "trainer.run_dir": str(tmp_path), "data.apply_chat_template": False}
    values |= {"data.train_batch_size": 2, "trainer.total_steps": 1, "trainer.logger": [], "trainer.save_freq": 0}
    config = load_config(SFTConfig, None, {**values, "data.max_length": 16}, given={"data"}).config
    device = replace(DEVICE, total=9 * 2**27)
    monkeypatch.setattr(sft, "free_accelerator", lambda cluster: device)
    launched = list[WorkerSpec]()

    def launch(specs: list[WorkerSpec], cluster: ClusterConfig) -> Any:
        launched.extend(specs)
        return launch_roles(specs, cluster)

    monkeypatch.setattr(sft, "launch_roles", launch)
    sft.train_sft(config, data=[{"prompt": "1+1=", "response": "2"}] * 2)
    tokens = micro_batch_tokens(replace(sft.SFTRun.setup(with_dtypes(config), [6, 6]), device=device), "actor")
    assert [each.args[0].max_tokens_per_micro_batch for each in launched] == [tokens] and 512 < tokens < 16_384


def test_the_engine_of_a_rollout_worker_has_that_room(
    train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, room = train_config(), CacheRoom(beside=7)
    monkeypatch.setattr(RolloutWorker, "is_beside_actor", lambda self: True)
    worker = RolloutWorker(
        Placement("rollout", 0, 1), config.rollout, str(config.model.path), config.model, cache_room=room
    )
    assert worker.engine._cache_room is room  # type: ignore[attr-defined]
