# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises
from whet.config import TrainConfig
from whet.errors import ConfigError
from whet.planning import machine
from whet.planning.machine import ANYWAY, FreeMemory
from whet.planning.planner import Setup
from whet.planning.units import size
from whet.plugins.planner import fit
from whet.plugins.planner.first import changed
from whet.plugins.planner.fit import Room, changes, check_fits, rooms, upper_bound
from whet.plugins.planner.memory import plan_memory
from whet.trainers import build
from whet.trainers.build import train

MakeConfig = Callable[..., TrainConfig]


def length(solution_str: str) -> float:
    return float(len(solution_str))


@pytest.fixture
def memory_left(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_(count: int) -> None:
        monkeypatch.setattr(fit, "free_memory", lambda: FreeMemory(count, "the machine's memory"))

    return set_


@pytest.mark.slow
def test_a_run_that_needs_more_memory_than_there_is_does_not_start(
    train_config: MakeConfig, additions: list[dict[str, str]], memory_left: Callable[[int], None]
) -> None:
    memory_left(4 * 2**20)
    config = train_config({"data.max_response_length": 64})
    with pytest.raises(ConfigError) as error:
        train(config, reward=length, data=additions)
    first, *advice, last = str(error.value).splitlines()
    untouched = plan_memory(build.setup(config, [len(row["prompt"]) for row in additions])).untouched_bytes
    assert untouched and f" {size(untouched)} of the KV " in first
    assert "in the phase actor update (" in first and f"{size(4 * 2**20)}, free in the machine's memory;" in first
    assert any("model.gradient_checkpointing=true saves " in line for line in advice)
    assert advice[-1].endswith("use a smaller model, or a machine with more memory")
    assert ANYWAY in last and "whet plan" in last
    assert not Path(str(config.trainer.run_dir)).exists()  # nothing was written


def test_it_starts_when_told_to(
    train_config: MakeConfig,
    additions: list[dict[str, str]],
    memory_left: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory_left(4 * 2**20)
    monkeypatch.setenv(ANYWAY, "1")
    assert train(train_config({"trainer.total_steps": 1}), reward=length, data=additions).step == 1


def test_a_disk_without_room_for_a_checkpoint_is_said_before_the_start(
    train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    setup = build.setup(train_config(), [16])
    needed = plan_memory(setup).checkpoint_bytes
    monkeypatch.setattr(machine, "free_disk", lambda path: needed - 1)
    with raises(
        ConfigError, "disk", expected=re.compile(str(tmp_path)), change=re.compile("trainer.run_dir")
    ) as caught:
        check_fits(setup, tmp_path, lambda config: build.setup(config, [16]))
    monkeypatch.setattr(machine, "free_disk", lambda path: 2 * needed)  # two are kept, and the third written before
    with caplog.at_level(logging.WARNING, "whet"):
        check_fits(setup, tmp_path, lambda config: build.setup(config, [16]))
    assert size(needed) in str(caught.value.found)
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.args == (2, size(3 * needed), tmp_path, size(2 * needed))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"model.dtype": "bfloat16", "data.max_response_length": 200},
        {"algorithm.adv_estimator": "gae", "data.train_batch_size": 32, "data.max_response_length": 100},
        {"rollout.engine.name": "hf", "rollout.top_p": 0.9, "actor.engine.packing": False},
    ],
)
def test_the_quick_bound_is_above_the_plan(train_config: MakeConfig, overrides: dict[str, Any]) -> None:
    setup = build.setup(train_config(overrides), [16])
    assert plan_memory(setup).touched_bytes < upper_bound(setup)


@pytest.mark.slow
def test_changes_are_ordered_by_what_they_save_and_hold(train_config: MakeConfig) -> None:
    config = train_config({"data.train_batch_size": 16, "data.max_response_length": 100})
    setup = build.setup(config, [16])
    [room] = rooms(setup)
    *single, together = changes(setup, room, lambda other: build.setup(other, [16]))
    assert [each.saved_bytes for each in single] == sorted((each.saved_bytes for each in single), reverse=True)
    assert together.override == " ".join(each.override for each in single)
    assert together.saved_bytes > single[0].saved_bytes
    best = single[0].override.split("=")
    after = plan_memory(build.setup(changed(config, {best[0]: {"true": True}.get(best[1], best[1])}), [16]))
    assert after.resident_bytes == single[0].needed_bytes == room.needed - single[0].saved_bytes


def test_settings_are_combined_only_while_each_saves_more(
    train_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the second of three settings the run needs more than with the first alone; with the third it needs less."""
    setup = build.setup(train_config(), [16])
    [room] = rooms(setup)
    saved = {frozenset({0}): 50, frozenset({1}): 40, frozenset({2}): 30, frozenset({0, 1}): 45, frozenset({0, 2}): 60}
    keys = ["trainer.seed", "trainer.save_freq", "trainer.total_epochs"]

    def rooms_of(other: Setup) -> list[Room]:
        tree = {"trainer": other.config.trainer.model_dump()}
        chosen = frozenset(number for number, key in enumerate(keys) if tree["trainer"][key.split(".")[1]] == 77)
        return [replace(room, needed=room.needed * (100 - saved[chosen]) // 100)]

    monkeypatch.setattr(fit, "_candidates", lambda *_: {f"{key}=77": {key: 77} for key in keys})
    monkeypatch.setattr(fit, "rooms", rooms_of)
    found = changes(setup, room, lambda other: build.setup(other, [16]))
    assert [each.override for each in found] == [*(f"{key}=77" for key in keys), f"{keys[0]}=77 {keys[2]}=77"]
    assert found[-1].saved_bytes == room.needed - room.needed * 40 // 100


@pytest.mark.slow
def test_an_accelerator_that_is_too_small_is_said_with_what_would_fit(
    train_config: MakeConfig, additions: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = train_config({"cluster.processes": 4, "algorithm.kl.where": "loss"})
    setup = replace(build.setup(config, [16]), device=FreeMemory(2**30, "each accelerator"))
    _, device = rooms(setup)
    monkeypatch.setattr(fit, "free_accelerator", lambda cluster: FreeMemory(device.tensors - 1, "each accelerator"))
    with raises(ConfigError, "memory", expected=re.compile("each accelerator$")) as error:
        check_fits(setup, tmp_path, lambda other: build.setup(other, [16]))
    _, *advice, _ = error.value.change.splitlines()
    assert size(device.needed) in str(error.value.found)
    assert [each for each in advice if "cluster" in each] == []
    named = list(fit._candidates(setup, device))
    assert {"actor.engine.name=fsdp", "ref.engine.name=fsdp", "rollout.free_cache_engine=true"} <= set(named)
    alone = replace(build.setup(train_config(), [16]), device=setup.device)
    assert not [override for override in fit._candidates(alone, rooms(alone)[1]) if "engine.name" in override]
