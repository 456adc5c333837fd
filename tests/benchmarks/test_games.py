# SPDX-License-Identifier: Apache-2.0
"""Runs of several seeds and the table of their medians, with a command that learns in no time."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import games, pictures, turn_credit
from benchmarks.setting import FULL, QUICK, Setting
from whet.config import TrainConfig, load_config

LEARNS = """
import json, pathlib, sys
name, seed, folder, *_ = sys.argv[1:]
pathlib.Path(folder).mkdir()
last = 0.5 + 0.1 * int(seed)
both = {"sft_accuracy": 0.25, "rl_accuracy": last, "steps": 120}
curve = {"curve": [[0, 0.125], [40, 0.5], [80, last]]}
pathlib.Path(folder, "summary.json").write_text(json.dumps(curve if name == "sokoban_vision" else both))
"""


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr(games, "command", lambda *told: [sys.executable, "-S", "-c", LEARNS, *map(str, told)])
    given: Any = {"scale": replace(FULL, quickstart_seeds=(0, 1, 4)), "scratch": tmp_path}
    return Setting(**{**dict.fromkeys(Setting.__dataclass_fields__), **given})


def test_medians_of_recipes_that_see(setting: Setting) -> None:
    found = json.loads(json.dumps({"pictures": pictures.run(setting)}))
    lines = pictures.report(found)
    assert [line.split(" | ")[:6] for line in lines[2:]] == [
        ["| `vlm_quickstart`", "0, 1, 4", "0.250", "0.600", "0.500, 0.600, 0.900", "120"],
        ["| `sokoban_vision`", "0, 1, 4", "0.125", "0.600", "0.500, 0.600, 0.900", "80"],
        ["| `two_images`", "0, 1, 4", "0.250", "0.600", "0.500, 0.600, 0.900", "120"],
        ["| `video_flashes`", "0, 1, 4", "0.250", "0.600", "0.500, 0.600, 0.900", "120"],
    ]


@pytest.mark.slow
def test_estimators_of_turns_are_runs_of_one_recipe(setting: Setting) -> None:
    found = json.loads(json.dumps({"turn_credit": turn_credit.run(setting)}))
    assert "segment_reinforce_gamma_1_4" in {path.name for path in setting.scratch.iterdir()}
    told, _, *lines = turn_credit.report(found)
    assert told == turn_credit.OF_GAE
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| `{label}`" for label in turn_credit.ESTIMATORS]
    assert lines[0].startswith("| estimator |") and lines[2].split(" | ")[4] == "0.500, 0.600, 0.900"
    configs = [
        load_config(
            TrainConfig,
            "number_game",
            [*turn_credit.changes(label), "model.path=x", "trainer.val_freq=0"],
            given=["data"],
        ).config
        for label in found["turn_credit"]
    ]
    algorithms = [config.algorithm for config in configs]
    assert [(each.adv_estimator, dict(each.adv_options)) for each in algorithms] == [
        ("grpo", {}),
        ("gigpo", {"gamma": 0.0}),
        ("segment_reinforce", {"gamma": 1.0}),
        ("segment_reinforce", {"gamma": 0.0}),
        ("step_reinforce", {"gamma": 0.0}),
        ("gae", {"gamma": 0.99, "lam": 0.95}),
    ]
    assert {config.trainer.total_steps for config in configs} == {80}
    assert (configs[-1].critic.warmup_steps, configs[-1].critic.optim.lr) == (5, 1e-3)


def test_a_run_that_fails_ends_the_benchmark_with_its_output(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = "print('no images'); raise SystemExit(3)"
    monkeypatch.setattr(games, "command", lambda *_: [sys.executable, "-S", "-c", fails])
    with pytest.raises(subprocess.CalledProcessError) as error:
        games.run(setting, ["two_images"])
    assert (error.value.returncode, error.value.output) == (3, "no images\n")


def test_in_the_quick_form_nothing_is_learned() -> None:
    quick: Any = {"scale": QUICK}
    made = Setting(**{**dict.fromkeys(Setting.__dataclass_fields__), **quick})
    assert pictures.report({"pictures": pictures.run(made)}) == []


def test_each_recipe_has_the_command_of_its_page() -> None:
    commands = {name: games.command(name, "2", Path("out")) for name in pictures.NAMES}
    told = ["--seed", "2", "--run-dir", "out"]
    assert commands["vlm_quickstart"][1:] == ["quickstart", "--images", *told]
    scripts = {name: (Path(words[1]).name, words[2:]) for name, words in commands.items() if name != "vlm_quickstart"}
    assert scripts == {
        "sokoban_vision": ("games.py", ["sokoban_vision", *told]),
        "two_images": ("pictures.py", ["two_images", *told]),
        "video_flashes": ("pictures.py", ["video_flashes", *told]),
    }
    assert all(Path(words[1]).is_file() for words in commands.values() if words[1].endswith(".py"))
