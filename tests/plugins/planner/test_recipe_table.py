# SPDX-License-Identifier: Apache-2.0
"""The table of docs/planning.md with a plan for each recipe by size equals the lines of `whet plan`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.plugins.planner.test_scale import DENSE, ROOT, SHAPES
from whet.cli.app import app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the passes of a model of 94 layers are traced
SMALL = {
    **DENSE,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
RECIPES = {"qwen2_5_0_5b_gsm8k_grpo": SMALL, **SHAPES}
MEMORY = re.compile(
    r"^memory: about ([\d.]+ [GT]iB)[^\n]* (?:an accelerator of \S+ \S+(?: of the pool (\w+))?|a node)", re.M
)


def rows() -> dict[str, list[str]]:
    """Machines, memory of an accelerator and of a node, by recipe."""
    page = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    table = page.partition("| recipe | machines |")[2].partition("\n\n")[0]
    cells = (line.strip("| ").split(" | ") for line in table.splitlines()[2:])
    return {name.strip("`"): rest for name, *rest in cells if name.endswith("`")}


def test_the_table_has_every_recipe_of_text() -> None:
    assert rows().keys() == RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_a_row_is_what_is_planned(name: str, tmp_path: Path) -> None:
    machines, accelerator, node = rows()[name]
    (tmp_path / "config.json").write_text(json.dumps(RECIPES[name]))
    gib = re.findall(r"(\d+) G", machines)[-1]
    words = ["plan", name, f"model.path={tmp_path}", "data.train_files=[]"]
    done = CliRunner().invoke(app, [*words, "--device-memory", gib, "--host-memory", "2000"])
    found = MEMORY.findall(done.output)
    by_pool = [(size, {"train": " training", "sample": " sampling", "": ""}[pool]) for size, pool in found[1:]]
    assert accelerator == ", ".join(f"{size}{pool}" for size, pool in by_pool), done.output
    assert node == found[0][0], done.output
