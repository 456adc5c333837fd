# SPDX-License-Identifier: Apache-2.0
"""Old names of keys: on the command line, in recipes, and in the folders of runs that an older version wrote."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises
from whet.config import SFTConfig, TrainConfig, load_config
from whet.config.load import rename
from whet.errors import ConfigError

OLD_ENGINE = {  # as an older version wrote it into a run's folder, where nothing was set
    "name": "single",
    "packing": None,
    "shard_size": None,
    "reshard_after_forward": True,
    "cpu_offload": False,
    "sequence_parallel_size": 1,
    "tensor_parallel_size": 1,
}


def test_an_old_name_is_read_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loaded = load_config(
            TrainConfig,
            None,
            ["rollout.name=hf", "actor.engine={name: fsdp, shard_size: 2, cpu_offload: true}"],
            checked=False,
        )
    config = loaded.config
    assert (config.rollout.engine.name, config.rollout.engine.options) == ("hf", {})
    assert config.actor.engine.options == {"shard_size": 2, "cpu_offload": True}
    assert config.critic.engine.options == {}
    assert loaded.source("rollout.engine.name") == "alias rollout.name (command line)"
    assert "rollout.name (command line) is now called rollout.engine.name" in caplog.text
    assert "actor.engine.shard_size (command line) is now called actor.engine.options.shard_size" in caplog.text
    one = load_config(SFTConfig, None, ["engine.name=fsdp", "engine.tensor_parallel_size=2"], checked=False).config
    assert one.engine.options == {"tensor_parallel_size": 2}


def test_what_the_command_line_says_wins_over_an_old_name_in_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "old.yaml"
    recipe.write_text("rollout: {name: hf, kv_cache_bytes: 5}\n")
    config = load_config(TrainConfig, recipe, ["rollout.engine.name=native"], checked=False).config
    assert config.rollout.engine.name == "native" and config.rollout.engine.options == {"kv_cache_bytes": 5}
    recipe.write_text("rollout: {engine: {name: hf}}\n")
    old = load_config(TrainConfig, recipe, ["rollout.name=native"], checked=False).config
    assert old.rollout.engine.name == "native"


def test_a_limit_of_processes_is_one_of_episodes(tmp_path: Path) -> None:
    recipe = tmp_path / "old.yaml"
    recipe.write_text("environment: {max_processes: 5, agents: {a: {max_processes: 7}, b: {max_processes: 256}}}\n")
    environment = load_config(TrainConfig, recipe, checked=False).config.environment
    assert environment.max_episodes == 5
    assert [each.max_episodes for each in environment.agents.values()] == [7, None]
    given = load_config(TrainConfig, recipe, ["environment.max_processes=256"], checked=False).config
    assert given.environment.max_episodes == 256


def test_the_folder_of_an_older_run_is_read(caplog: pytest.LogCaptureFixture) -> None:
    def read(schema: type[TrainConfig | SFTConfig], **values: Any) -> Any:
        rename(schema, values)
        return schema.model_validate(values)

    rollout = {"name": "hf", "kv_cache_bytes": 2**30, "compile": False, "n": 4}
    config = read(TrainConfig, rollout=rollout, actor={"engine": dict(OLD_ENGINE)})
    assert config.rollout.engine.model_dump() == {"name": "hf", "options": {}} and config.rollout.n == 4
    assert config.actor.engine.name == "single" and config.actor.engine.options == {}
    sharded = {**OLD_ENGINE, "name": "fsdp", "sequence_parallel_size": 2}
    assert read(SFTConfig, engine=sharded).engine.options == {"sequence_parallel_size": 2}
    judge = read(TrainConfig, reward_model={"engine": {"name": "single", "compile": True}}).reward_model
    assert judge.engine.options == {"compile": True}
    assert not caplog.records  # nobody can change it there


def test_an_old_name_of_no_known_value_is_refused_like_the_new_one() -> None:
    with raises(ConfigError, "rollout.engine.name", found="hff", change=re.compile("'hf'")):
        load_config(TrainConfig, None, ["rollout.name=hff"])
