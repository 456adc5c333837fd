# SPDX-License-Identifier: Apache-2.0
"""A finished run to look at and to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, additions: list[dict[str, str]]) -> Path:
    """The folder of a run of four steps that kept all of its checkpoints; not to be written to."""
    from whet.config import TrainConfig, load_config
    from whet.trainers.build import train

    folder = tmp_path_factory.mktemp("finished") / "run"
    overrides = {
        "model.path": str(model_folder),
        "data.apply_chat_template": False,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 16,
        "data.max_response_length": 6,
        "rollout.n": 4,
        "reward.num_workers": 0,
        "actor.mini_batch_size": 2,
        "trainer.total_steps": 4,
        "trainer.save_freq": 1,
        "trainer.save_limit": None,
        "trainer.val_freq": -1,
        "trainer.logger": ["jsonl"],
        "trainer.run_dir": str(folder),
    }
    train(
        load_config(TrainConfig, None, overrides, given={"reward", "data"}).config,
        reward=score,
        data=additions,
    )
    return folder


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


def score(solution_str: str) -> dict[str, float]:
    """Pays for sevens."""
    return {"reward": float(solution_str.count("7")), "length": float(len(solution_str))}
