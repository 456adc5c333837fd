# SPDX-License-Identifier: Apache-2.0
"""`whet train` on a mesh, killed and resumed on the same mesh and on another one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import SMALL_RUN
from tests.models.nano import nano_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
STEPS, KILLED_AT, SAVED_EVERY = 5, 4, 2
CALLBACK = f"""
import os, signal

def kill(run, step, numbers):
    if step == {KILLED_AT} and "KILLED" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
"""
MESHES = {  # processes, mesh and those of the other run; the options of both engines
    "shard and tensor": ((4, {"shard": 2, "tensor": 2}), (2, {"context": 2})),
    "pipeline": ((2, {"pipeline": 2}), (2, {"tensor": 2})),
    "experts": ((2, {"shard": 2, "expert": 2}), (2, {"pipeline": 2})),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nano models, data and a callback that kills the run."""
    made = tmp_path_factory.mktemp("runs")
    for kind in ("qwen3", "qwen3_moe"):
        nano_model(made / kind, kind, tie_word_embeddings=False)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(4)]
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (made / "kills.py").write_text(CALLBACK)
    (made / "pays.py").write_text('def sevens(solution_str):\n    return float(solution_str.count("7"))\n')
    return made


def trained(folder: Path, run: Path, kind: str, processes: int, mesh: dict[str, int], is_killed: bool = False) -> str:
    """Runs the command.  Returns what it printed."""
    values = {
        **SMALL_RUN,
        "model.path": folder / kind,
        "data.train_files": folder / "rows.jsonl",
        "reward.function": f"{folder / 'pays.py'}:sevens",
        "cluster.processes": processes,
        "actor.engine.name": "fsdp",
        "actor.optim.lr": 1e-3,
        "trainer.total_steps": STEPS,
        "trainer.save_freq": SAVED_EVERY,
        "trainer.save_limit": None,
        "trainer.callbacks": [f"{folder / 'kills.py'}:kill"],
        "trainer.run_dir": run,
    }
    words = [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()]
    words += [f"actor.engine.options.mesh={{{', '.join(f'{name}: {size}' for name, size in mesh.items())}}}"]
    environment = {**os.environ, **({"KILLED": "1"} if is_killed else {})}
    command = [sys.executable, "-m", "whet", "train", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == (-signal.SIGKILL if is_killed else 0), done.stdout + done.stderr
    return done.stdout + done.stderr


def numbers(run: Path) -> list[dict[str, float]]:
    """The metrics of each step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_and_states(run: Path) -> dict[tuple[str, str], torch.Tensor]:
    """The shards in the last checkpoint, by file and name."""
    files = (run / "checkpoints" / f"global_step_{STEPS}" / "actor.state").glob("shard-*")
    return {(file.name, name): each for file in files for name, each in load_file(file).items()}


@pytest.mark.parametrize("name", MESHES)
def test_a_killed_run_goes_on_with_the_numbers_of_one_undisturbed(name: str, folder: Path, tmp_path: Path) -> None:
    kind, (same, other) = "qwen3_moe" if name == "experts" else "qwen3", MESHES[name]
    calm, killed, moved = (tmp_path / each for each in ("calm", "killed", "moved"))
    trained(folder, calm, kind, *same)
    trained(folder, killed, kind, *same, is_killed=True)
    assert {each.name for each in (killed / "checkpoints").glob("global_step_*")} == {f"global_step_{SAVED_EVERY}"}
    shutil.copytree(killed, moved)
    trained(folder, killed, kind, *same)
    assert (killed / "metrics.jsonl").read_bytes() == (calm / "metrics.jsonl").read_bytes()
    found, expected = (weights_and_states(each) for each in (killed, calm))
    assert found.keys() == expected.keys() and any("optimizer" in name for _, name in expected)
    assert all(found[name].equal(expected[name]) for name in expected)

    trained(folder, moved, kind, *other)
    calm_numbers, moved_numbers = numbers(calm), numbers(moved)
    assert len(moved_numbers) == len(calm_numbers) == STEPS
    assert moved_numbers[:SAVED_EVERY] == calm_numbers[:SAVED_EVERY]
    for expected_step, step in zip(calm_numbers, moved_numbers, strict=True):
        for metric in expected_step.keys() & step.keys():
            assert step[metric] == pytest.approx(expected_step[metric], rel=1e-4, abs=1e-5), metric
