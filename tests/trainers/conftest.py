# SPDX-License-Identifier: Apache-2.0
"""A finished run to look at and to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import SMALL_RUN


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, additions: list[dict[str, str]]) -> Path:
    """The folder of a run of four steps that kept all of its checkpoints; not to be written to."""
    from whet.config import TrainConfig, load_config
    from whet.trainers.build import train

    folder = tmp_path_factory.mktemp("finished") / "run"
    overrides = {
        **SMALL_RUN,
        "model.path": str(model_folder),
        "actor.mini_batch_size": 2,
        "trainer.total_steps": 4,
        "trainer.save_freq": 1,
        "trainer.save_limit": None,
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
