# SPDX-License-Identifier: Apache-2.0
"""The quickstart's task on several processes, sampled ahead, and on two nodes is learnt as well as in one process.

Shortened: 100 steps instead of 600, 200 where samples are stale. LOG.md has the whole runs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from examples.two_nodes import main as on_two_nodes
from tests.trainers.quickstart_runs import GSM8K, NOISE, accuracies, command, gsm8k_run, make_task, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
STEPS, STALE_STEPS = 100, 400


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("cluster") / "quickstart")


def test_several_processes_learn_as_well_as_one(task: Path) -> None:
    """One test, so that the runs in one process are made once."""
    for recipe, alone in (
        ("quickstart_fsdp2", "quickstart"),
        ("quickstart_split", "quickstart"),
        ("quickstart_ppo_split", "ppo_quickstart"),
    ):
        start, *_, end = trained(recipe, task, STEPS)
        expected_start, *_, expected_end = trained(alone, task, STEPS)
        assert start == expected_start and expected_end > start + 0.2, recipe
        assert end == pytest.approx(expected_end, abs=NOISE), recipe


@pytest.mark.parametrize("recipe", ["quickstart_async", "quickstart_async_ray"])
def test_a_run_that_samples_ahead_learns_as_well_as_one_that_waits(task: Path, recipe: str) -> None:
    """With a replica of the native engine, and with two on a Ray cluster."""
    if recipe.endswith("ray"):
        pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
    start, *_, end = trained(recipe, task, STALE_STEPS)
    expected_start, *_, expected_end = trained("quickstart", task, STALE_STEPS)
    assert start == expected_start and expected_end > 0.85
    assert end > expected_end - NOISE


def test_two_nodes_learn_as_well_as_one_process(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a network namespace and an address of its own."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[dev-services]'")
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]))
    status = on_two_nodes([sys.executable, "-m", "whet", *command("quickstart_two_nodes", task, STEPS)])
    if status == 2:
        pytest.skip("network namespaces are not permitted here, or there is no `ip` command")
    assert status == 0
    start, *_, end = accuracies("quickstart_two_nodes", task, STEPS)
    expected_start, *_, expected_end = trained("quickstart", task, STEPS)
    assert start == expected_start and end == pytest.approx(expected_end, abs=NOISE)


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not beside the repository (../shared/data/gsm8k)")
def test_gsm8k_with_a_small_qwen_on_two_processes(tmp_path: Path) -> None:
    lines = gsm8k_run("gsm8k_fsdp2", tmp_path, steps=3)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["actor/grad_norm"] >= 0 and line["response_length/mean"] > 0 for line in lines[1:])
    answers = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_000003.jsonl").open()]
    assert len(answers) == 16 and {answer["policy_version"] for answer in answers} == {2}
