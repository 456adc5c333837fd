# SPDX-License-Identifier: Apache-2.0
"""The gap between vLLM's log-probs and the model's own forward in float32, by size of the model."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import rollout_conformance as suite
import server_conformance as servers

from whet.models.init import init_model
from whet.models.load import load_policy
from whet.rollout.protocol import generate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
log = logging.getLogger(__name__)


@pytest.mark.parametrize(("size", "millions", "limit"), [("tiny", 3, 5e-6), ("base", 353, 5e-5)])
def test_the_largest_gap(start: servers.Start, tmp_path: Path, size: str, millions: int, limit: float) -> None:
    """Before and after an update; eight requests of 32 tokens."""
    init_model(tmp_path / "model", "qwen2.5", size, max_position_embeddings=2048)
    model = load_policy(tmp_path / "model").eval()
    assert model.dtype == torch.float32 and model.num_parameters() // 10**6 == millions
    engine = start(tmp_path / "model", answer_seconds=240.0, server={"max_model_len": 256})
    made = suite.requests(groups=4, n=2, stop_token_ids=(), max_new_tokens=32)
    for version in range(2):
        gap = torch.cat([suite.gaps(model, *each) for each in zip(made, generate(engine, made), strict=True)])
        log.info("%d M parameters, version %d: largest gap %.1e, mean %.1e", millions, version, gap.max(), gap.mean())
        assert len(gap) == 8 * 32 and gap.max() <= limit
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.mul_(1.5 if "layernorm" in name else 0.9)
        engine.load(model.named_parameters(), version + 1)
    engine.close()
