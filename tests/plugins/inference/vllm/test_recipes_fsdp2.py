# SPDX-License-Identifier: Apache-2.0
"""The recipe `quickstart_vllm_fsdp2` learns the quickstart's task as well as one process, and GSM8K takes steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.quickstart_runs import GSM8K, assert_learns_as_well, gsm8k_run, make_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def test_a_replica_beside_each_of_two_ranks(has_vllm: None, tmp_path: Path) -> None:
    assert_learns_as_well("quickstart_vllm_fsdp2", make_task(tmp_path / "quickstart"))


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
