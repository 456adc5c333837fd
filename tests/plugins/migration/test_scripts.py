# SPDX-License-Identifier: Apache-2.0
"""Scripts in the forms of other frameworks become the recipe that was worked out by hand: scripts.yaml has both."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.first import first
from whet.config import load_config
from whet.config.commands import schema_of
from whet.config.compose import flatten
from whet.errors import ConfigError
from whet.plugins.migration.convert import Converted, convert
from whet.plugins.migration.foreign_files import read

SCRIPTS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("scripts.yaml").read_text())
RECIPES = [name for name, script in SCRIPTS.items() if "recipe" in script]


def written(name: str, folder: Path) -> Path:
    script = SCRIPTS[name]
    for other, text in script.get("beside", {}).items():
        (folder / other).write_text(text)
    file = folder / f"{name}.{script.get('form', 'sh')}"
    cells = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in script.get("cells", [])]
    file.write_text(script["text"] if "text" in script else json.dumps({"cells": [{"cell_type": "markdown"}, *cells]}))
    return file


def converted(name: str, folder: Path) -> Converted:
    script = SCRIPTS[name]
    return convert(read(str(written(name, folder)), script["from"], script.get("set", {})), script["from"])


def of_here(value: Any, file: Path) -> Any:
    """A value with the path of the script, and the home folder, in the place of FILE and HOME."""
    if isinstance(value, list):
        return [of_here(each, file) for each in value]
    return (
        value.replace("FILE:", f"{file}:").replace("HOME/", f"{os.environ['HOME']}/")
        if isinstance(value, str)
        else value
    )


def test_there_are_thirty_scripts_of_six_frameworks() -> None:
    assert len(SCRIPTS) >= 30
    assert {script["from"] for script in SCRIPTS.values()} == {"verl", "easyr1", "roll", "trl", "openrlhf", "slime"}


@pytest.mark.parametrize("name", first(6, RECIPES, others=pytest.mark.slow))
def test_a_script_becomes_the_recipe_worked_out_by_hand(name: str, tmp_path: Path) -> None:
    script, found = SCRIPTS[name], converted(name, tmp_path)
    given = {key: value for key, value in found.values.items()
             if not found.origins.get(key, "no KL").startswith(("default of", "always in", "no KL"))}  # fmt: skip
    expected = {
        key: of_here(value, tmp_path / f"{name}.{script.get('form', 'sh')}") for key, value in script["recipe"].items()
    }
    assert dict(flatten(given)) == dict(flatten(expected))
    assert {key: found.values.get(key) for key in script.get("defaults", {})} == script.get("defaults", {})
    assert not [key for key in script.get("never", []) if key in found.values]
    assert found.command == script.get("command", "train")
    for group, words in script.get("told", {}).items():
        assert [each for each in words if not any(each in line for line in getattr(found, group))] == []


@pytest.mark.parametrize("name", first(4, RECIPES, others=pytest.mark.slow))
def test_the_recipe_is_one_that_the_command_reads(name: str, tmp_path: Path) -> None:
    """The text loads, key by key, as the values that were converted."""
    found, file = converted(name, tmp_path), tmp_path / "recipe.yaml"
    file.write_text(found.to_yaml())
    config = load_config(schema_of(found.command), file, checked=False).config
    loaded = dict(flatten(config.model_dump(mode="json")))
    for key, value in flatten(found.values):
        stored = loaded.get(key, dict(flatten(loaded)).get(key))
        assert stored == ([value] if isinstance(stored, list) and not isinstance(value, list) else value), key


@pytest.mark.parametrize("name", [name for name, script in SCRIPTS.items() if "choices" in script])
def test_a_branch_that_changes_numbers_is_a_choice(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        converted(name, tmp_path)
    lines = [line.strip().removeprefix("--set ") for line in raised.value.change.splitlines()[1:]]
    assert [line for line in lines if any(map(line.startswith, SCRIPTS[name]["choices"]))] == SCRIPTS[name]["choices"]


@pytest.mark.parametrize("name", [name for name, script in SCRIPTS.items() if "refused" in script])
def test_what_is_not_reinforcement_learning_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=SCRIPTS[name]["refused"]):
        converted(name, tmp_path)
