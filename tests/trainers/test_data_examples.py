# SPDX-License-Identifier: Apache-2.0
"""The example files of one's own data, each in a run that is stopped and goes on as if it never had been."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whet.config import TrainConfig, load_config
from whet.trainers.build import train

FOLDER = Path(__file__).parents[2] / "examples" / "extending"
PRODUCTS = f"{FOLDER}/data_set.py:Products"


def reward(solution_str: str) -> float:
    return float(len(solution_str) % 2)


def asked(run_dir: Path, step: int) -> list[str]:
    lines = (run_dir / "rollouts" / f"step_{step:06}.jsonl").read_text().splitlines()
    return list(dict.fromkeys(json.loads(line)["uid"].rpartition(":")[0] for line in lines))


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"data.sampler": f"{FOLDER}/sampler.py:Unsolved"}, id="learning"),
        pytest.param(
            {"data.sampler": f"{FOLDER}/sampler.py:shortest_first", "data.sampler_options": {"epochs": 2}},
            id="order",
            marks=pytest.mark.slow,
        ),
        pytest.param({"data.sampler": "learnability"}, id="learnability", marks=pytest.mark.slow),
        pytest.param(
            {"data.train_files": [{"path": PRODUCTS, "options": {"count": 6}}, PRODUCTS], "data.weights": [0.75, 0.25]},
            id="mixture",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_examples_train_and_resume(
    overrides: dict[str, Any], train_config: Callable[..., TrainConfig], model_folder: Path, tmp_path: Path
) -> None:
    products = {"path": PRODUCTS, "options": {"digits": 1, "count": 7}}
    base = {"data.train_files": [products], "trainer.save_freq": 2, "data.train_batch_size": 3, **overrides}

    def make(name: str, steps: int) -> TrainConfig:
        values = {**base, "trainer.total_steps": 4, "trainer.run_dir": str(tmp_path / name)}
        config = train_config(values)
        return config.model_copy(
            update={"trainer": config.trainer.model_copy(update={"callbacks": [f"{stop}:at_{steps}"]})}
        )

    stop = tmp_path / "stop.py"
    stop.write_text(
        "def at_2(run, step, metrics):\n    run.total_steps = min(run.total_steps, 2)\n"
        "def at_4(run, step, metrics):\n    pass\n"
    )
    whole = train(make("whole", 4), reward=reward)
    train(make("stopped", 2), reward=reward)
    resumed = train(make("stopped", 4), reward=reward)
    assert resumed.history == whole.history
    for step in (1, 2, 3, 4):
        assert asked(tmp_path / "whole", step) == asked(tmp_path / "stopped", step)
    uids = [uid for step in (1, 2, 3, 4) for uid in asked(tmp_path / "whole", step)]
    assert len(set(uids)) == len(uids) == 12


@pytest.mark.slow
def test_the_data_set_is_another_one_in_validation() -> None:
    from examples.extending.data_set import Products

    train_rows, val_rows = Products(0, "train", digits=1, count=5), Products(0, "val", digits=1, count=5)
    assert [train_rows[i] for i in range(5)] != [val_rows[i] for i in range(5)]
    assert all(int(row["answer"]) == row["size"] for row in (train_rows[i] for i in range(len(train_rows))))
    assert load_config(TrainConfig, None, [f"data.train_files={PRODUCTS}"], checked=False).config.data.train_files == [
        PRODUCTS
    ]
