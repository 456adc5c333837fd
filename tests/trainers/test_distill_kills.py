# SPDX-License-Identifier: Apache-2.0
"""A run of `whet distill` that is killed three times ends with the bits of one that never was."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.trainers.killed_runs import check_survives_kills
from whet.plugins.lessons.init_model import init_model

ALPHABET = "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz<>"  # of the student


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_distilled_run_survives_kills(model_folder: Path, tmp_path: Path) -> None:
    """Half of the responses are sampled by the student."""
    teacher = init_model(tmp_path / "teacher", "qwen3", "nano", alphabet=ALPHABET, num_layers=2, seed=5)
    assert AutoTokenizer.from_pretrained(teacher).get_vocab() == AutoTokenizer.from_pretrained(model_folder).get_vocab()
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(4) for b in range(5)]
    words = ["distill", f"model.path={model_folder}", f"teachers={{*: {teacher}}}", "loss=jsd", "on_policy=0.5"]
    check_survives_kills(tmp_path, [*words, "max_response_length=4"], rows)
