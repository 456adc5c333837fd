# SPDX-License-Identifier: Apache-2.0
"""The gap between vLLM's log-probs and the model's own forward in float32, by size of the model."""

from __future__ import annotations

import logging
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import rollout_conformance as suite
import server_conformance as servers

from whet.models.load import load_policy
from whet.plugins.lessons.init_model import init_model
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


def test_twenty_updates(start: servers.Start, tmp_path: Path) -> None:
    """The largest gap after each of twenty updates of 3 M parameters, and the milliseconds of an update by call."""
    init_model(tmp_path / "model", "qwen2.5", "tiny", max_position_embeddings=2048)
    model = load_policy(tmp_path / "model").eval()
    engine = start(tmp_path / "model", answer_seconds=240.0, server={"max_model_len": 256})
    made = suite.requests(groups=4, n=2, stop_token_ids=(), max_new_tokens=32)
    generate(engine, made)
    spent, plain = defaultdict[str, list[float]](list), engine.call

    def call(method: str, path: str, body: Any = None) -> Any:
        began = time.perf_counter()
        answer = plain(method, path, body)
        spent[path.partition("?")[0]].append(1e3 * (time.perf_counter() - began))
        return answer

    gaps, draw = list[torch.Tensor](), torch.Generator().manual_seed(0)
    for version in range(1, 21):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=draw) * 0.05 * weight.std())
        engine.call, began = call, time.perf_counter()
        engine.load(model.named_parameters(), version)
        spent["whole"].append(1e3 * (time.perf_counter() - began))
        engine.call, answers = plain, generate(engine, made)
        assert {each.versions for each in answers} == {((version, 32),)}
        gaps += [suite.gaps(model, *each) for each in zip(made, answers, strict=True)]
    gap, medians = torch.cat(gaps), {name: statistics.median(values) for name, values in spent.items()}
    log.info("20 updates: largest gap %.2e, mean %.1e", gap.max(), gap.mean())
    log.info("milliseconds of an update (median): %s", {name: round(value, 1) for name, value in medians.items()})
    assert len(gap) == 20 * 8 * 32 and gap.max() <= 2e-6
    assert medians["/update_weights"] < medians["whole"] < 1000
    engine.close()
