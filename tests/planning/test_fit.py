# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.config import TrainConfig
from whet.errors import ConfigError
from whet.planning import fit
from whet.planning.fit import ANYWAY, changed, changes, check_fits, size, upper_bound
from whet.planning.machine import FreeMemory
from whet.planning.memory import plan_memory
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


def test_sizes_as_a_person_reads_them() -> None:
    assert [size(count) for count in (0, 999, 1000, 2048, 150 * 2**20, 1000 * 2**20, 3 * 2**40)] == [
        *("0 B", "999 B", "1.0 KiB", "2.0 KiB", "150 MiB", "1.0 GiB", "3.0 TiB"),
    ]


def test_a_run_that_needs_more_memory_than_there_is_does_not_start(
    train_config: MakeConfig, additions: list[dict[str, str]], memory_left: Callable[[int], None]
) -> None:
    memory_left(4 * 2**20)
    config = train_config({"data.max_response_length": 64})
    with pytest.raises(ConfigError) as error:
        train(config, reward=length, data=additions)
    first, *advice, last = str(error.value).splitlines()
    untouched = plan_memory(build.setup(config, [len(row["prompt"]) for row in additions])).untouched_bytes
    assert untouched and f"; not counted {size(untouched)} of the KV cache, reserved" in first
    assert "in its actor update (" in first and first.endswith("and the machine's memory has 4.0 MiB free")
    assert any("model.gradient_checkpointing=true saves " in line for line in advice)
    assert advice[-1].endswith("take a smaller model, or a machine with more memory")
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
    monkeypatch.setattr(fit, "free_disk", lambda path: needed - 1)
    with pytest.raises(
        ConfigError, match=r"a checkpoint takes about .* free; make room, choose another trainer\.run_dir"
    ):
        check_fits(setup, tmp_path, lambda config: build.setup(config, [16]))
    monkeypatch.setattr(fit, "free_disk", lambda path: 2 * needed)  # two are kept, and the third written before
    with caplog.at_level(logging.WARNING, "whet"):
        check_fits(setup, tmp_path, lambda config: build.setup(config, [16]))
    assert "lower trainer.save_limit" in caplog.text


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


def test_changes_are_ordered_by_what_they_save_and_hold(train_config: MakeConfig) -> None:
    config = train_config({"data.train_batch_size": 16, "data.max_response_length": 100})
    setup = build.setup(config, [16])
    memory = plan_memory(setup)
    *single, together = changes(setup, memory, lambda other: build.setup(other, [16]))
    assert [each.saved_bytes for each in single] == sorted((each.saved_bytes for each in single), reverse=True)
    assert together.override == " ".join(each.override for each in single)
    assert together.saved_bytes > single[0].saved_bytes
    best = single[0].override.split("=")
    after = plan_memory(build.setup(changed(config, {best[0]: {"true": True}.get(best[1], best[1])}), [16]))
    assert after.resident_bytes == single[0].resident_bytes == memory.resident_bytes - single[0].saved_bytes
