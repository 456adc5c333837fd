# SPDX-License-Identifier: Apache-2.0
"""Plans against real runs: tensors within 10 %, resident memory above the imports within 25 %, on unlike configs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.generate import fits
from whet.config import SFTConfig, TrainConfig, load_config
from whet.planning.dtypes import with_dtypes
from whet.planning.planner import Setup
from whet.plugins.lessons.init_model import init_model
from whet.plugins.planner.forecast import row_lengths
from whet.plugins.planner.memory import plan_memory
from whet.trainers import build, sft

ROWS = [
    {"prompt": f"What is {a} plus {b}? " * (1 + a % 3), "answer": str(a + b), "response": f"It is {a + b}. " * (3 + b)}
    for a in range(20)
    for b in range(10)
]
RUN = {
    "data.apply_chat_template": False,
    "trainer.total_steps": 2,
    "trainer.val_freq": -1,
    "trainer.logger": ["jsonl"],
}
TRAIN = {
    **RUN,
    "reward.num_workers": 0,
    "data.max_prompt_length": 64,
    "data.max_response_length": 96,
    "data.train_batch_size": 8,
    "rollout.n": 4,
}
NATIVE = {"rollout.engine.options.kv_cache_bytes": 2**26}
# Command, architecture, rows of the vocabulary, values.
CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "grpo with a reference": ("train", "qwen3", 8192, {"algorithm.kl.where": "loss"}),
    "bfloat16": ("train", "qwen3", 8192, {"model.dtype": "bfloat16"}),
    "muon, recomputed activations, bfloat16": (
        "train",
        "qwen3",
        8192,
        {
            "model.dtype": "bfloat16",
            "model.gradient_checkpointing": True,
            "actor.optim.name": "muon",
            "actor.max_tokens_per_micro_batch": 4096,
        },
    ),
    "ppo": (
        "train",
        "qwen2.5",
        2048,
        {
            "algorithm.adv_estimator": "gae",
            "rollout.n": 1,
            "data.train_batch_size": 32,
            "actor.mini_batch_size": 16,
            "critic.mini_batch_size": 16,
        },
    ),
    "hf, padded, nucleus": (
        "train",
        "qwen2.5",
        2048,
        {"rollout.engine.name": "hf", "rollout.top_p": 0.9, "actor.engine.packing": False},
    ),
    "supervised": (
        "sft",
        "qwen3",
        8192,
        {"data.max_length": 256, "data.train_batch_size": 16, "max_tokens_per_micro_batch": 1024},
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """27 M parameters and some for the vocabulary."""
    made = tmp_path_factory.mktemp("models")
    return {
        "qwen3": init_model(made / "qwen3", "qwen3", "small", vocab_size=8192),
        "qwen2.5": init_model(made / "qwen25", "qwen2.5", "small", vocab_size=2048),
    }


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_near_what_is_measured(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    command, arch, _, changed = CASES[name]
    common = RUN if command == "sft" else TRAIN if "rollout.engine.name" in changed else {**TRAIN, **NATIVE}
    overrides = {**common, "model.path": str(folders[arch]), **changed}
    memory = plan_memory(setup(command, overrides, tmp_path))
    tensors = measured("tensors", command, overrides, tmp_path)
    resident = measured("resident", command, overrides, tmp_path)
    found = {
        "tensors": round(memory.tensor_bytes / tensors - 1, 3),
        "resident": round(memory.resident_bytes / resident - 1, 3),
    }
    sys.stderr.write(f"\n{name}: planned over measured {found}, {tensors / 2**20:.0f}, {resident / 2**20:.0f} MiB\n")
    assert abs(found["tensors"]) <= 0.10 and abs(found["resident"]) <= 0.25, found


def setup(command: str, overrides: dict[str, Any], folder: Path) -> Setup:
    """With the lengths of the rows that the run is given."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    overrides = {**overrides, "data.train_files": [str(file)]}
    if command == "sft":
        supervised = with_dtypes(load_config(SFTConfig, None, overrides, checked=False).config)
        return sft.SFTRun.setup(supervised, row_lengths(supervised)[0])
    config = with_dtypes(load_config(TrainConfig, None, overrides, checked=False).config)
    return build.setup(config, row_lengths(config)[0])


def measured(kind: str, command: str, overrides: dict[str, Any], folder: Path) -> int:
    """By a run in a process of its own."""
    overrides = {**overrides, "trainer.run_dir": str(folder / kind)}
    (folder / "run.json").write_text(
        json.dumps({"command": command, "recipe": None, "overrides": overrides, "rows": ROWS})
    )
    script = Path(__file__).with_name("measured_run.py")
    run = subprocess.run(
        [sys.executable, str(script), kind, str(folder / "run.json")],
        capture_output=True,
        text=True,
        timeout=700,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert run.returncode == 0, run.stderr
    (count,) = json.loads(run.stdout.splitlines()[-1]).values()
    return int(count)


@pytest.mark.slow
@pytest.mark.parametrize("work", fits.MEASURED)
def test_a_plan_is_near_what_a_card_measured(work: str) -> None:
    """Within a twentieth, and never less than a hundredth below it."""
    _, found = fits.MEASURED[work]
    assert 0.99 < fits.on_card(work) / 2**30 / found < 1.05
