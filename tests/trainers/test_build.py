# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from whet.config import TrainConfig
from whet.errors import ModelError
from whet.planning.machine import FreeMemory
from whet.planning.memory import cache_room
from whet.rollout.planned import CacheRoom
from whet.trainers import build
from whet.trainers.columns import plan
from whet.trainers.rollout_worker import RolloutWorker

MakeConfig = Callable[..., TrainConfig]
DEVICE = FreeMemory(2**36, "each accelerator")


def given(config: TrainConfig) -> dict[str, Any]:
    """What the workers of a run get by name."""
    specs = build.worker_specs(config, plan(config), 2)
    return {each.role: each.kwargs for each in build._with_room(specs, build.setup(config, [16]))}


def test_a_rollout_on_an_accelerator_is_told_its_room_beside_training(
    train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = train_config({"algorithm.kl.where": "loss"})
    assert given(config) == {"actor": {}, "ref": {}, "rollout": {"cache_room": None}}  # on the host
    monkeypatch.setattr(build, "free_accelerator", lambda cluster: DEVICE)
    wanted = cache_room(replace(build.setup(config, [16]), device=DEVICE))
    assert wanted is not None and wanted.beside > 0
    assert given(config) == {"actor": {}, "ref": {}, "rollout": {"cache_room": wanted}}
    set_size = train_config({"rollout.engine.options.kv_cache_bytes": 2**20})
    assert given(set_size)["rollout"] == {"cache_room": None}

    def unknown(setup: Any) -> None:
        raise ModelError("an operator whose output shape depends on numbers")

    monkeypatch.setattr(build, "cache_room", unknown)  # training may need anything: the cache takes no more than 1 GiB
    assert given(config)["rollout"]["cache_room"] == CacheRoom(most=0)
    assert CacheRoom(most=0).bytes(2**40) == 2**30


def test_the_engine_of_a_rollout_worker_has_that_room(
    train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whet.controller.worker import Placement

    config, room = train_config(), CacheRoom(beside=7)
    monkeypatch.setattr(RolloutWorker, "is_beside_actor", lambda self: True)
    worker = RolloutWorker(
        Placement("rollout", 0, 1), config.rollout, str(config.model.path), config.model, cache_room=room
    )
    assert worker.engine._cache_room is room  # type: ignore[attr-defined]
