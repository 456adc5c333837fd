# SPDX-License-Identifier: Apache-2.0
"""The recipe `gsm8k_vllm` takes steps, whole and with adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.quickstart_runs import GSM8K, gsm8k_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


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
