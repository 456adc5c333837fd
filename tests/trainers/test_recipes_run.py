# SPDX-License-Identifier: Apache-2.0
"""Every shipped recipe on the quickstart's task takes steps, on its own data and a small model."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.plugins.sandbox.conftest import needs_bubblewrap
from tests.raising import raises
from whet.cli.app import app
from whet.config import TrainConfig, load_config
from whet.config.compose import find_recipe, shipped_recipes
from whet.data.sources import read_rows
from whet.errors import DataError
from whet.registry import REWARDS
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
    if "mini_batch_size" in find_recipe(name).read_text():
        small["actor.mini_batch_size"] = 4
    for record in train(load_config(TrainConfig, name, small).config).history:
        assert record["actor/grad_norm"] > 0


EXAMPLES = {
    "preference dpo": {"chosen": "4", "rejected": "five"},
    "preference kto": {"completion": "4", "label": True},
    "distill gkd": {"response": "4"},
    "sft rejection_sampling": {"response": "4", "example_weight": 2},
    "sft expert_iteration": {"response": "4"},
}


@pytest.mark.slow
@pytest.mark.parametrize("command", EXAMPLES)
def test_a_recipe_of_examples_takes_steps(command: str, model_folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", **EXAMPLES[command]}) + "\n" for n in range(8)))
    words = [*command.split(), f"model.path={model_folder}", f"data.train_files={rows}", f"data.val_files={rows}"]
    words += ["data.train_batch_size=4", "data.apply_chat_template=false", "trainer.logger=jsonl"]
    words += [f"trainer.run_dir={tmp_path / 'run'}", "trainer.total_epochs=1", "data.max_length=32"]
    if "distill" in command:
        words += [f"teachers={{*: {model_folder}}}", "max_response_length=4"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 1, 2]
    area = command.split()[0]
    assert records[1][f"{area}/lr"] > 0 and records[-1]["val/loss"] >= 0


def half_right(solution_str: str) -> float:
    """Right where the answer is of even length, so that a random model's groups differ."""
    return float(len(solution_str) % 2 == 0)


@pytest.mark.slow
def test_all_algorithms_that_have_a_paper_of_their_own_are_there() -> None:
    expected = "cispo cpo dapo dr_grpo gigpo gpg gspo max_rl opo ppo prime reinforce_plus_plus remax rloo skywork sppo"
    assert [name.removesuffix("_quickstart") for name in RECIPES] == expected.split()


def or1_rows() -> list[dict[str, Any]]:
    """Rows in the form of Skywork-OR1's data: lists of answers, tests of code, failures of models."""
    rows = []
    for number, failures in enumerate((0, 3, 15, 16, 8, 1)):
        is_code = number % 2 == 1
        tests = {"inputs": ["1\n"], "outputs": ["2\n"]}
        rows.append(
            {
                "data_source": f"train-{'code-taco' if is_code else 'math-numina'}",
                "prompt": [{"role": "user", "content": f"{number}+1="}],
                "ability": "code" if is_code else "math",
                "reward_model": {"ground_truth": tests if is_code else [str(number + 1)], "style": "rule"},
                "extra_info": {"index": number, "model_difficulty": {"DeepSeek-R1-Distill-Qwen-7B": failures}},
            }
        )
    return rows


@needs_bubblewrap
@pytest.mark.slow
def test_the_recipe_of_or1_on_its_own_form_of_data(model_folder: Path, tmp_path: Path) -> None:
    pickled, rows = tmp_path / "train_7b.pkl", tmp_path / "rows.jsonl"
    pickled.write_bytes(pickle.dumps(or1_rows()))
    small: dict[str, Any] = {
        "model.path": str(model_folder),
        "data.train_files": [str(pickled)],
        "data.val_files": [],
        "data.train_batch_size": 4,
        "data.max_prompt_length": 16,
        "data.max_response_length": 8,
        "data.apply_chat_template": False,
        "cluster.processes": 1,
        "rollout.n": 4,
        "rollout.engine.name": "native",
        "rollout.length_stages": {0: 4, 2: 6, 3: 8},
        "reward.num_workers": 0,
        "actor.engine.options.mesh.context": 1,
        "rollout.engine.options.kv_cache_bytes": 2**20,
        "trainer.total_steps": 3,
        "trainer.val_freq": -1,
        "trainer.save_freq": 0,
        "trainer.logger": ["jsonl"],
        "trainer.run_dir": str(tmp_path / "run"),
    }
    with raises(DataError, change=re.compile("data convert")):
        train(load_config(TrainConfig, "skywork_or1_7b", small).config)
    assert CliRunner().invoke(app, ["data", "convert", str(pickled), str(rows)]).exit_code == 0
    assert read_rows(rows) == or1_rows()
    score = REWARDS[load_config(TrainConfig, "skywork_or1_7b", checked=False).config.reward.function].load()
    program = "```python\nprint(int(input()) + 1)\n```"
    for row in read_rows(rows):
        for answer in (program, rf"\boxed{{{row['extra_info']['index'] + 1}}}"):
            is_right = (answer == program) == (row["ability"] == "code")
            found = score(row["data_source"], answer, row["reward_model"]["ground_truth"], row["extra_info"] | row)
            assert found["reward"] == float(is_right)
    small["reward.function"] = f"{__file__}:half_right"  # a random model solves none
    small["data.train_files"] = [str(rows)]
    history = train(load_config(TrainConfig, "skywork_or1_7b", small).config).history
    assert [record["response_length/max"] for record in history] == [4, 6, 8]
    files = (tmp_path / "run" / "rollouts").glob("step_*.jsonl")
    drawn = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert {row["data_source"] for row in drawn} == {"train-code-taco", "train-math-numina"}
    assert {row["index"] for row in drawn} == {1, 2, 4, 5}  # solved sometimes, not always and not never
