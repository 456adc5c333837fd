# SPDX-License-Identifier: Apache-2.0
"""The quickstart's task on several processes and on two nodes is learnt as well as in one process.

Shortened: 100 steps instead of 600. LOG.md has the whole runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.two_nodes import main as on_two_nodes
from whet.checkpoints.export import export
from whet.models.init import init_model
from whet.trainers.quickstart import warm_up, write_problems

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"
STEPS = 100
NOISE = 0.06  # of an accuracy over 512 problems, between two runs that round differently: three standard errors
RUN_SECONDS = 900


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `whet quickstart` has made before its RL stage."""
    folder = tmp_path_factory.mktemp("cluster") / "quickstart"
    rows, _ = write_problems(folder, seed=0)
    init_model(
        folder / "model", "qwen3", "nano", alphabet="0123456789+=", num_layers=2, max_position_embeddings=64, seed=0
    )
    warm_up(folder, 0, rows)
    export(folder / "sft", folder / "sft_model")
    return folder


def command(recipe: str, task: Path) -> list[str]:
    return [
        *("train", recipe, f"model.path={task}/sft_model", f"trainer.run_dir={task}/{recipe}"),
        *(f"data.train_files={task}/train.jsonl", f"data.val_files={task}/held_out.jsonl"),
        *(f"trainer.total_steps={STEPS}", "trainer.logger=[jsonl]"),
    ]


def accuracies(recipe: str, task: Path) -> list[float]:
    """On the held-out problems, at the start, in the middle and at the end."""
    lines = [json.loads(line) for line in (task / recipe / "metrics.jsonl").open()]
    return [line["val/accuracy"] for line in lines if "val/accuracy" in line]


def trained(recipe: str, task: Path) -> list[float]:
    """`accuracies` of a run, which is made once."""
    if not (task / recipe / "metrics.jsonl").exists():
        whet = [sys.executable, "-m", "whet", *command(recipe, task)]
        done = subprocess.run(whet, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
    return accuracies(recipe, task)


def test_several_processes_learn_as_well_as_one(task: Path) -> None:
    """One test, so that the runs in one process are made once."""
    for recipe, alone in (
        ("quickstart_fsdp2", "quickstart"),
        ("quickstart_split", "quickstart"),
        ("quickstart_ppo_split", "ppo_quickstart"),
    ):
        start, *_, end = trained(recipe, task)
        expected_start, *_, expected_end = trained(alone, task)
        assert start == expected_start and expected_end > start + 0.2, recipe
        assert end == pytest.approx(expected_end, abs=NOISE), recipe


def test_two_nodes_learn_as_well_as_one_process(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a network namespace and an address of its own."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]))
    status = on_two_nodes([sys.executable, "-m", "whet", *command("quickstart_two_nodes", task)])
    if status == 2:
        pytest.skip("network namespaces are not permitted here, or there is no `ip` command")
    assert status == 0
    start, *_, end = accuracies("quickstart_two_nodes", task)
    expected_start, *_, expected_end = trained("quickstart", task)
    assert start == expected_start and end == pytest.approx(expected_end, abs=NOISE)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not beside the repository (../shared/data/gsm8k)")
def test_gsm8k_with_a_small_qwen_on_two_processes(tmp_path: Path) -> None:
    init_model(tmp_path / "model", "qwen2.5", "nano", num_layers=2, seed=0)
    overrides = [
        *(f"model.path={tmp_path}/model", f"trainer.run_dir={tmp_path}/run", "trainer.total_steps=3"),
        *(f"data.train_files={GSM8K}/train.jsonl", f"data.val_files={GSM8K}/test.jsonl", "data.val_max_prompts=8"),
        *("data.train_batch_size=4", "rollout.n=4", "data.max_response_length=32", "data.max_prompt_length=1024"),
    ]
    whet = [sys.executable, "-m", "whet", "train", "gsm8k_fsdp2", *overrides]
    done = subprocess.run(whet, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["actor/grad_norm"] >= 0 and line["response_length/mean"] > 0 for line in lines[1:])
    answers = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_000003.jsonl").open()]
    assert len(answers) == 16 and {answer["policy_version"] for answer in answers} == {2}
