# SPDX-License-Identifier: Apache-2.0
"""Every shipped recipe on the quickstart's task takes steps, on its own data and a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whet.config import TrainConfig, load_config
from whet.config.compose import SHIPPED, shipped_recipes
from whet.trainers.build import train

# They have turns or a model of their own: tests/environments/test_game_recipes.py, tests/config/test_recipes.py.
OTHERS = {"calculator_quickstart", "vlm_quickstart"}
RECIPES = [name for name in shipped_recipes() if name.endswith("_quickstart") and name not in OTHERS]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_steps(name: str, model_folder: Path, additions: list[dict[str, str]], tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in additions))
    small: dict[str, Any] = {
        "model.path": str(model_folder),
        "data.train_files": str(rows),
        "data.train_batch_size": 8,
        "reward.function": f"{__file__}:half_right",
        "trainer.total_steps": 2,
        "critic.warmup_steps": 0,
        "trainer.val_freq": -1,
        "trainer.logger": ["jsonl"],
        "trainer.run_dir": str(tmp_path / "run"),
    }
    if "mini_batch_size" in (SHIPPED / f"{name}.yaml").read_text():
        small["actor.mini_batch_size"] = 4
    for record in train(load_config(TrainConfig, name, small).config).history:
        assert record["actor/grad_norm"] > 0


def half_right(solution_str: str) -> float:
    """Right where the answer is of even length, so that a random model's groups differ."""
    return float(len(solution_str) % 2 == 0)


@pytest.mark.slow
def test_all_algorithms_that_have_a_paper_of_their_own_are_there() -> None:
    expected = "cispo cpo dapo dr_grpo gigpo gpg gspo max_rl opo ppo prime reinforce_plus_plus remax rloo skywork sppo"
    assert [name.removesuffix("_quickstart") for name in RECIPES] == expected.split()
