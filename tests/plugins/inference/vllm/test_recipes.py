# SPDX-License-Identifier: Apache-2.0
"""Recipes with vLLM: the quickstart's task is learnt as well as in one process, and GSM8K takes steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.quickstart_runs import GSM8K, NOISE, gsm8k_run, make_task, trained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
STEPS = {"quickstart_vllm": 100, "quickstart_vllm_fsdp2": 50}


def test_vllm_learns_as_well_as_the_native_engine(has_vllm: None, tmp_path: Path) -> None:
    """With a replica that samples ahead of one trainer, and with one beside each of two FSDP2 ranks. One test, so that
    the run in one process is made once."""
    task = make_task(tmp_path / "quickstart")
    expected = trained("quickstart", task, max(STEPS.values()))  # before the first step, after 50, after 100
    assert expected[-1] > 0.8
    for recipe, steps in STEPS.items():
        found = trained(recipe, task, steps)
        assert found[0] == pytest.approx(expected[0], abs=NOISE), recipe
        assert found[-1] > expected[len(found) - 1] - NOISE, recipe


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not beside the repository (../shared/data/gsm8k)")
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.lora.rank=8"],
        ["model.lora.rank=8", "actor.optim.lr=1e-5", "rollout.engine.options.adapter=true"],  # that of docs/vllm.md
    ],
)
def test_gsm8k_with_a_small_qwen(has_vllm: None, tmp_path: Path, overrides: list[str]) -> None:
    """Samples are at most one step old, and log-probs of both sides agree."""
    memory = "rollout.engine.options.kv_cache_bytes=268435456"
    lines = gsm8k_run(
        "gsm8k_vllm", tmp_path, "rollout.dtype=float32", "model.dtype=float32", memory, *overrides, steps=5
    )
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert all(line["actor/grad_norm"] >= 0 and line["staleness/max"] <= 1 for line in lines[1:])
    assert lines[1]["correction/abs_max"] < 2e-5
