# SPDX-License-Identifier: Apache-2.0
"""docs/migrating.md names keys that exist, on whet's side and on verl's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ROOT
from tests.peers.peer import interpreter
from whet.config.keys import is_known
from whet.config.schema import TrainConfig

PAGE = (ROOT / "docs" / "migrating.md").read_text()
KEY = re.compile(r"`([a-z_]+(?:\.[A-Za-z_]+)*)(?:=[^`]*)?`")


def rows(title: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize("title", ["From verl", "From EasyR1", "From ROLL"])
def test_whets_side_of_the_tables_exists(title: str) -> None:
    keys = [key for row in rows(title) for key in KEY.findall(row[1])]
    assert len(keys) > 25
    assert not [key for key in keys if not is_known(TrainConfig, key)]


def test_verls_keys_are_not_whets_by_accident() -> None:
    """Equal names would be taken without a word: those that are equal mean the same, and the table has them."""
    for theirs, ours, *_ in rows("From verl"):
        for key in KEY.findall(theirs):
            assert not is_known(TrainConfig, key) or key in KEY.findall(ours), key


@pytest.mark.slow
def test_verls_side_exists() -> None:
    python = interpreter("WHET_PEERS_VENV", ".venv-peers")
    where = subprocess.run(
        [str(python), "-c", "import importlib.util as u; print(u.find_spec('verl').submodule_search_locations[0])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    config = yaml.safe_load((Path(where) / "trainer" / "config" / "_generated_ppo_trainer.yaml").read_text())
    for theirs, *_ in rows("From verl"):
        for key in KEY.findall(theirs):
            found = config
            for name in key.split("."):
                assert name in found, f"verl has no {key}"
                found = found[name]
