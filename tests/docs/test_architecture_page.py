# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/architecture.md have the members of the protocols, with their parameters; no more and no fewer."""

from __future__ import annotations

import inspect
import re

import pytest

from tests.docs.pages import ROOT
from whet.engines.protocol import Objective, TrainEngine
from whet.rollout.protocol import RolloutEngine

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("protocol", [RolloutEngine, Objective, TrainEngine], ids=lambda each: each.__name__)
def test_a_contract_has_the_members_of_its_protocol(protocol: type) -> None:
    named = {name: value for name, value in vars(protocol).items() if not name.startswith("_")}
    members = {name: value.__func__ if isinstance(value, classmethod) else value for name, value in named.items()}
    wanted = {
        name if isinstance(value, property) else f"{name}({', '.join([*inspect.signature(value).parameters][1:])})"
        for name, value in members.items()
    }
    table = PAGE.partition(f"`{protocol.__name__}` ")[2].partition("|---|---|\n")[2].partition("\n\n")[0]
    shown = [name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.split("|")[1])]
    assert sorted(shown) == sorted(wanted)


def test_the_page_is_read_in_one_sitting() -> None:
    assert PAGE.count("\n") <= 250
