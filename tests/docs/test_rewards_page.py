# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/rewards.md agree with the code."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT
from whet.plugins.scores.auto import SOURCES
from whet.registry import REWARDS

PAGE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([^`]+)`")


def rows(head: str) -> list[list[str]]:
    """The cells of the table with this first line."""
    table = PAGE.partition(f"| {head} |\n")[2].partition("\n\n")[0]
    return [re.split(r" \| ", line.strip("| ")) for line in table.splitlines()[1:]]


def test_every_shipped_function_has_its_row() -> None:
    listed = [name for first, _ in rows("shipped function | reward") for name in CODE.findall(first)]
    assert sorted(listed) == [entry.name for entry in REWARDS if entry.target.startswith("whet.")]


def test_the_data_sources_are_those_of_auto() -> None:
    listed = {}
    for sources, function in rows("`data_source` | function"):
        name, *options = CODE.findall(function)
        given = dict(option.split("=") for option in options)
        listed |= dict.fromkeys(CODE.findall(sources), (name, given))
    assert listed == {
        source: (name, {key: f"{value}" for key, value in options.items()})
        for source, (name, options) in SOURCES.items()
    }
