# SPDX-License-Identifier: Apache-2.0
"""vLLM on the devices of several ranks: of two training ranks, and of two nodes, whose parts meet on one machine; and
weights that come to its rank as deltas."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import rollout_conformance as suite
import server_conformance as servers
import server_episodes as episodes
from test_training import APART, check_run

from whet.config.schema import ModelConfig
from whet.plugins.inference.servers.process import free_port
from whet.plugins.inference.vllm.engine import VLLMEngine
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Span, generate

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_two_parts_are_one_server(has_vllm: None, tmp_path: Path) -> None:
    model = servers.random_model(tmp_path, "qwen3", hidden_size=256, num_layers=2)
    port, given = free_port(None), ModelConfig(path=model.config._name_or_path)
    options = {**servers.SMALL, "weights_dir": str(tmp_path), "restarts": 0, "tensor_parallel_size": 2}
    front, part = (
        VLLMEngine(torch.float32, 8, torch.device("cpu"), given, 2, Span(2, number, "127.0.0.1", port), **options)
        for number in range(2)
    )
    try:
        made = suite.requests(groups=2, n=2)
        for version in range(1, 3):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1.0 + version / 16)
            front.load(model.named_parameters(), version)
            alone = NativeEngine()
            alone.attach(model, version)
            found, expected = generate(front, made), generate(alone, made)
            assert [each.token_ids for each in found] == [each.token_ids for each in expected]
            for one, other in zip(found, expected, strict=True):
                assert one.log_probs == pytest.approx(other.log_probs, abs=2e-5)
    finally:
        front.close()
        part.close()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one server on two training ranks": (
        {"cluster.processes": 2, "actor.engine.name": "fsdp"},
        {"tensor_parallel_size": 2},
    ),
    "changes alone, to another pool": ({"rollout.dtype": "bfloat16", **APART}, {"weight_delta": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_that_of_the_native_engine(
    has_vllm: None, train_config: episodes.MakeConfig, additions: list[dict[str, Any]], tmp_path: Path, case: str
) -> None:
    check_run(train_config, additions, tmp_path, *CASES[case], case)
