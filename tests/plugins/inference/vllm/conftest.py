# SPDX-License-Identifier: Apache-2.0
"""A vLLM server for each model, where there is an environment for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import server_conformance as servers

from whet.plugins.inference.vllm.engine import PACKAGE, VLLMEngine


@pytest.fixture(scope="session")
def has_vllm() -> None:
    """Skips where no environment with vLLM is found."""
    servers.require(PACKAGE)


@pytest.fixture(scope="module")
def start() -> Iterator[servers.Start]:
    """Starts engines, and closes them at the end of the file."""
    with servers.starting(VLLMEngine) as start:
        yield start


@pytest.fixture(scope="module", params=["qwen3", "qwen2.5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A random model of 3 M parameters: with a tied head, and with biases and a head of its own."""
    folder = tmp_path_factory.mktemp("models")
    return servers.random_model(folder, request.param, hidden_size=192, num_layers=6)


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel, start: servers.Start) -> VLLMEngine:
    """A server that samples from `model`."""
    made: VLLMEngine = start(Path(model.config._name_or_path))
    return made


@pytest.fixture
def first_weights(engine: VLLMEngine, model: PreTrainedModel) -> None:
    """Gives the server the model's own weights, with nothing under way."""
    servers.reset(engine, model)
