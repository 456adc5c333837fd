# SPDX-License-Identifier: Apache-2.0
"""README.md names existing things; tests/docs/test_code_blocks.py runs its blocks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click import Context
from typer.main import get_command

from whet.cli.app import app
from whet.config.compose import shipped_recipes
from whet.registry import ADV_ESTIMATORS, POLICY_LOSSES

README = (Path(__file__).parents[1] / "README.md").read_text()


@pytest.mark.shipped
def test_every_command_of_the_table_is_one_and_none_is_missing() -> None:
    listed = set(re.findall(r"^\| `whet ([a-z-]+)", README, re.MULTILINE))
    command = get_command(app)
    assert listed == set(command.list_commands(Context(command)))  # type: ignore[attr-defined]


def test_its_pictures_exist_and_are_small() -> None:
    pictures = re.findall(r"^!\[.+\]\((.+)\)$", README, re.MULTILINE)
    sizes = [(Path(__file__).parents[1] / each).stat().st_size for each in pictures]
    assert len(sizes) == 2 and max(sizes) < 100_000


def test_what_make_is_asked_for_exists() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    asked = set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
    assert asked and asked <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_the_recipes_are_counted_right() -> None:
    recipes = [each for each in shipped_recipes() if each.endswith("_quickstart")]
    counted = len({*recipes} - {"calculator_quickstart", "vlm_quickstart"})
    assert f"| recipes | {counted} algorithms on the quickstart's task" in README


def test_estimators_and_losses_are_counted_right() -> None:
    for name, kind in (("estimators", ADV_ESTIMATORS), ("losses", POLICY_LOSSES)):
        counted = sum(entry.alias_of is None for entry in kind)
        assert f"| {name} | {counted}, from " in README
