# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from whet.cli.app import app
from whet.cli.arguments import split_recipe
from whet.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "config_name", "expected"),
    [
        (None, None, (None, [])),
        (["gsm8k"], None, ("gsm8k", [])),
        (["gsm8k", "rollout.n=8"], None, ("gsm8k", ["rollout.n=8"])),
        (["rollout.n=8"], None, (None, ["rollout.n=8"])),
        (["~rollout.n"], None, (None, ["~rollout.n"])),
        (["+extra.a=1"], None, (None, ["+extra.a=1"])),
        (["rollout.n=8"], "gsm8k", ("gsm8k", ["rollout.n=8"])),
        (["a/b.yaml", "x=1", "y"], None, ("a/b.yaml", ["x=1", "y"])),
    ],
)
def test_a_first_word_that_is_no_override_is_the_recipe(
    words: list[str] | None, config_name: str | None, expected: tuple[str | None, list[str]]
) -> None:
    assert split_recipe(words, config_name) == expected


def test_a_file_with_an_equals_sign_in_its_path_is_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "lr=1" / "config.yaml"
    assert split_recipe([str(recipe)], None) == (None, [str(recipe)])
    recipe.parent.mkdir()
    recipe.touch()
    assert split_recipe([str(recipe), "x=1"], None) == (str(recipe), ["x=1"])


@pytest.mark.parametrize("flag", ["--config-name", "--config_name"])
def test_the_recipe_is_named_in_the_spelling_of_hydra_and_of_roll(flag: str) -> None:
    result = CliRunner().invoke(app, ["config", "train", flag, "no_such_recipe"])
    assert isinstance(result.exception, ConfigError) and result.exception.key == "recipe no_such_recipe"
