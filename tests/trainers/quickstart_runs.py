# SPDX-License-Identifier: Apache-2.0
"""Runs of recipes on the quickstart's task and on GSM8K, through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from whet.checkpoints.export import export
from whet.plugins.lessons.init_model import init_model
from whet.plugins.lessons.quickstart import warm_up, write_problems

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"
NOISE = 0.06  # of an accuracy over 512 problems, between two runs that round differently: three standard errors
RUN_SECONDS = 900


def make_task(folder: Path) -> Path:
    """The state of `whet quickstart` before its RL stage."""
    rows, _ = write_problems(folder, seed=0)
    init_model(
        folder / "model", "qwen3", "nano", alphabet="0123456789+=", num_layers=2, max_position_embeddings=64, seed=0
    )
    warm_up(folder, 0, rows)
    export(folder / "sft", folder / "sft_model")
    return folder


def whet(words: list[str]) -> None:
    """Runs `whet`, which must end well."""
    command = [sys.executable, "-m", "whet", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def command(recipe: str, task: Path, steps: int) -> list[str]:
    return [
        *("train", recipe, f"model.path={task}/sft_model", f"trainer.run_dir={task}/{recipe}_{steps}"),
        *(f"data.train_files={task}/train.jsonl", f"data.val_files={task}/held_out.jsonl"),
        *(f"trainer.total_steps={steps}", "trainer.logger=[jsonl]"),
    ]


def accuracies(recipe: str, task: Path, steps: int) -> list[float]:
    """On the held-out problems: at the start, in the middle and at the end."""
    return [line["val/accuracy"] for line in metrics(task / f"{recipe}_{steps}") if "val/accuracy" in line]


def trained(recipe: str, task: Path, steps: int, *overrides: str) -> list[float]:
    """`accuracies` of a run, which is made once."""
    if not (task / f"{recipe}_{steps}" / "metrics.jsonl").exists():
        whet([*command(recipe, task, steps), *overrides])
    return accuracies(recipe, task, steps)


def assert_learns_as_well(recipe: str, task: Path, *overrides: str, steps: int = 200) -> None:
    """As well as the recipe `quickstart`, which is trained first, with the same `overrides`."""
    expected_start, *_, expected_end = trained("quickstart", task, steps, *overrides)
    assert expected_end > 0.85
    start, *_, end = trained(recipe, task, steps, *overrides)
    assert start == pytest.approx(expected_start, abs=NOISE) and end > expected_end - NOISE, recipe


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def gsm8k_run(recipe: str, folder: Path, *overrides: str, steps: int) -> list[dict[str, Any]]:
    """The metrics of a run with a small Qwen2.5 on the published GSM8K; its last step's answers in step_N.jsonl."""
    if not (folder / "model").exists():
        init_model(folder / "model", "qwen2.5", "nano", num_layers=2, seed=0)
    words = [
        *(
            "train",
            recipe,
            f"model.path={folder}/model",
            f"trainer.run_dir={folder}/run",
            f"trainer.total_steps={steps}",
        ),
        *(f"data.train_files={GSM8K}/train.jsonl", f"data.val_files={GSM8K}/test.jsonl", "data.val_max_prompts=8"),
        *("data.train_batch_size=4", "rollout.n=4", "data.max_response_length=32", "data.max_prompt_length=1024"),
    ]
    whet([*words, *overrides])
    return metrics(folder / "run")
