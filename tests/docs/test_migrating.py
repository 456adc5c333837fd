# SPDX-License-Identifier: Apache-2.0
"""docs/migrating.md names keys that verl has; tests/plugins/migration/test_foreign.py looks at ours."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ROOT
from tests.peers.peer import interpreter

PAGE = (ROOT / "docs" / "migrating.md").read_text()
KEY = re.compile(r"`([a-z_]+(?:\.[A-Za-z_]+)*)(?:=[^`]*)?`")


def rows(title: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n##")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.slow
def test_verls_side_exists() -> None:
    """In its config; or, below `reward`, in the code that reads it, since a command adds it with +."""
    python = interpreter("WHET_PEERS_VENV", ".venv-peers")
    where = subprocess.run(
        [str(python), "-c", "import importlib.util as u; print(u.find_spec('verl').submodule_search_locations[0])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    code = "".join(file.read_text() for file in (Path(where) / "trainer" / "ppo").glob("*.py"))
    code += "".join(file.read_text() for file in (Path(where) / "experimental" / "reward_loop").rglob("*.py"))
    files = sorted((Path(where) / "trainer" / "config").glob("_generated_ppo*.yaml"))  # of each training engine
    configs = [yaml.safe_load(file.read_text()) for file in files]
    for theirs, *_ in rows("From verl"):
        for key in KEY.findall(theirs):
            found = configs
            for name in key.split("."):
                within = [each[name] for each in found if isinstance(each, dict) and name in each]
                if not within and key.startswith("reward."):
                    assert f'"{name}"' in code, f"verl does not read {key}"
                    break
                assert within, f"verl has no {key}"
                found = within
