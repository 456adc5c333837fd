# SPDX-License-Identifier: Apache-2.0
"""A mixture whose routers have biases, which are parameters in vLLM and buffers in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engines.test_router_bias import role
from tests.models.nano import nano_model, plain_log_probs
from whet.config.schema import ModelConfig
from whet.engines.single import SingleEngine
from whet.models.load import router_biases
from whet.plugins.inference.vllm.engine import VLLMEngine
from whet.rollout.protocol import Completion, Request, SamplingParams, generate
from whet.weight_sync import buckets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32, "vocab_size": 64}
REQUESTS = [Request(str(n), (5, 6, 7, 8 + n), SamplingParams(12), n) for n in range(4)]


def gap(folder: Path, sampled: list[Completion]) -> float:
    """Returns the largest difference of log-probs to the model of a folder in transformers, in float32."""
    gaps = []
    for request, done in zip(REQUESTS, sampled, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *done.token_ids]])
        expected = plain_log_probs(folder, ids)[0, -len(done.token_ids) :]
        gaps.append((expected - torch.tensor(done.log_probs)).abs().max().item())
    return max(gaps)


def test_an_update_brings_the_biases_of_routers(has_vllm: None, tmp_path: Path) -> None:
    folder = nano_model(tmp_path / "model", "glm4_moe", **SIZES)
    trained = SingleEngine(role(folder))
    options = {"restarts": 0, "kv_cache_bytes": 2**26, "threads": 1}
    engine = VLLMEngine(torch.bfloat16, 8, torch.device("cpu"), ModelConfig(path=str(folder)), **options)
    try:
        buckets.copy(engine.load, trained.named_weights(), 1, torch.bfloat16)
        assert gap(folder, list(generate(engine, REQUESTS))) < 0.1
        for bias in router_biases(trained.model):  # so that tokens go to other experts
            bias.neg_()
        trained.model.save_pretrained(tmp_path / "other")
        buckets.copy(engine.load, trained.named_weights(), 2, torch.bfloat16)
        sampled = list(generate(engine, REQUESTS))
        assert gap(tmp_path / "other", sampled) < 0.1 < gap(folder, sampled)
    finally:
        engine.close()
