# SPDX-License-Identifier: Apache-2.0
"""The JSON schema for editors accepts the same recipes as the loader."""

from __future__ import annotations

from functools import cache
from typing import Any

import jsonschema
import pytest
import yaml

from tests.first import first
from whet.config import EvalConfig, GenerateConfig, SFTConfig, TrainConfig, load_config
from whet.config.commands import commands, schema_of as config_of
from whet.config.compose import SHIPPED, find_recipe, shipped_recipes
from whet.config.load import json_schema
from whet.config.section import Section, choices
from whet.errors import ConfigError

schema_of = cache(json_schema)
SCHEMA = schema_of(TrainConfig)


def is_valid(recipe: Any, schema: dict[str, Any] = SCHEMA) -> bool:
    return bool(jsonschema.Draft7Validator(schema).is_valid(recipe))


@pytest.mark.parametrize("command", [TrainConfig, SFTConfig, EvalConfig, GenerateConfig])
def test_it_is_a_schema(command: type[Section]) -> None:
    jsonschema.Draft7Validator.check_schema(schema_of(command))


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_validates(name: str) -> None:
    command = config_of(next((each for each in commands() if name.endswith(f"_{each}")), "train"))
    recipe = yaml.safe_load(find_recipe(name).read_text())
    jsonschema.Draft7Validator(schema_of(command)).validate(recipe)


def test_a_part_of_recipes_validates_as_its_section() -> None:
    part = yaml.safe_load((SHIPPED / "data" / "gsm8k.yaml").read_text())
    data = {"$ref": "#/$defs/DataConfig", "$defs": SCHEMA["$defs"]}
    assert is_valid(part, data) and not is_valid({**part, "prompt_kye": "x"}, data)


@pytest.mark.parametrize(
    "recipe",
    first(
        4,
        [
            "rollout: {n: 4}",
            "rollout:",
            "rollout: {n: '${data.train_batch_size}'}",
            "data: {train_files: one.jsonl}",
            "data: {train_files: [one.jsonl, {path: two.jsonl, weight: 2}]}",
            "data: {train_files: 3}",
            "trainer: {logger: jsonl, experiment_name: 7}",
            "trainer: {total_steps: null, val_freq: -1}",
            "rollout: {length_stages: {1: 64, 100: 128}}",
            "actor: {optim: {betas: [0.9, 0.99], lr: 1.0e-6}}",
            "reward: {function: [gsm8k, my.py:f], kwargs: {anything: 1}}",
            "custom_reward_function: {path: my.py, name: f}",
            "algorithm: {adv_estimator: my.py:mine, adv_options: {scale: 2}}",
            "extra: {mine: [1, 2]}",
            "rollout: {nn: 4}",
            "rollouts: {n: 4}",
            "rollout.n: 4",
            "rollout: {n: 0}",
            "rollout: {n: many}",
            "rollout: {n: true}",
            "rollout: {top_p: 1.5}",
            "actor: {optim: {betas: [0.9]}}",
            "trainer: {logger: {paper: 1}}",
            "model: {dtype: float16}",
            "custom_reward_function: {file: my.py}",
        ],
        others=pytest.mark.slow,
    ),
)
def test_it_takes_and_refuses_what_the_loader_does(recipe: str, tmp_path: Any) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(recipe)
    try:
        load_config(TrainConfig, file, checked=False)
        loads = True
    except ConfigError:
        loads = False
    assert is_valid(yaml.safe_load(recipe)) == loads


def test_an_editor_can_offer_what_is_registered() -> None:
    assert len(choices(TrainConfig)) == 18
    for key, choice in choices(TrainConfig).items():
        *sections, name = key.split(".")
        part = SCHEMA
        for each in sections:
            part = SCHEMA["$defs"][part["properties"][each]["anyOf"][0]["$ref"].rpartition("/")[2]]
        offered = part["properties"][name]["examples"]  # other tests register more, before and after
        assert offered and {*choice.registry.shipped} <= {*offered} <= {*choice.registry.names()}
    n = SCHEMA["$defs"]["RolloutConfig"]["properties"]["n"]
    assert (n["description"], n["default"]) == ("responses a prompt", 8)
