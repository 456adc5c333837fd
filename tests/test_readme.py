# SPDX-License-Identifier: Apache-2.0
"""What README.md shows is run as it stands there, on a model and data that a test can carry."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click import Context
from typer.main import get_command

import whet
from tests.docs.pages import blocks
from whet import registry
from whet.algorithms.adapters import estimate
from whet.cli.app import app

FILE = Path(__file__).parents[1] / "README.md"
README = FILE.read_text()
SMALL: dict[str, Any] = {
    "data.train_batch_size": 2,
    "data.max_prompt_length": 128,
    "data.max_response_length": 8,
    "trainer.total_steps": 1,
    "trainer.val_freq": -1,
    "trainer.logger": ["jsonl"],
    "reward.num_workers": 1,
}


def snippet(containing: str) -> str:
    """The Python block of README.md with these words."""
    (found,) = [block.code for block in blocks(FILE) if block.language == "python" and containing in block.code]
    return found


def test_training_from_python(qwen25_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"What is {number} + 1?", "answer": f"So. #### {number + 1}"} for number in range(4)]
    train = whet.train
    small = partial(train, **{**SMALL, "trainer.run_dir": str(tmp_path / "run")})
    monkeypatch.setattr(whet, "train", small)
    names: dict[str, Any] = {"rows": rows}
    exec(snippet("whet.train(").replace('"DIR"', repr(str(qwen25_folder))), names)
    assert len(names["run"].history) == 1 and 0 <= names["run"].history[-1]["critic/score/mean"] <= 1
    assert names["run"].config.rollout.n == 8


def test_an_estimator_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.ADV_ESTIMATORS, "_live", dict(registry.ADV_ESTIMATORS._live))
    file = tmp_path / "my_file.py"
    file.write_text(snippet("register_adv_est"))
    entry = registry.ADV_ESTIMATORS[f"{file}:mine"]
    assert entry.doc.startswith("What `whet algorithms show mine` prints.")
    rewards, mask = torch.tensor([[0.0, 2.0, 9.0]]), torch.tensor([[1, 1, 0]])
    columns = {"token_level_rewards": rewards, "response_mask": mask, "uid": torch.tensor([0])}
    assert estimate(entry, columns, {"scale": 0.5}).advantages.tolist() == [[1.0, 1.0, 0.0]]


def test_every_command_of_the_table_is_one_and_none_is_missing() -> None:
    listed = set(re.findall(r"^\| `whet ([a-z-]+)", README, re.MULTILINE))
    command = get_command(app)
    assert listed == set(command.list_commands(Context(command)))  # type: ignore[attr-defined]


def test_what_make_is_asked_for_exists() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    asked = set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
    assert asked and asked <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_the_recipes_are_counted_right() -> None:
    counted = len(list((Path(whet.__file__).parent / "recipes").glob("*_quickstart.yaml")))
    assert f"| recipes | {counted} algorithms on the quickstart's task" in README
