# SPDX-License-Identifier: Apache-2.0
"""An SGLang server, where there is an environment for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import server_conformance as servers

from whet.plugins.inference.sglang.engine import SGLangEngine


@pytest.fixture(scope="module")
def start() -> Iterator[servers.Start]:
    """Starts engines, and closes them at the end of the file."""
    with servers.starting(SGLangEngine) as start:
        yield start


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A random model with a tied head."""
    return servers.random_model(tmp_path_factory.mktemp("models"), "qwen3")


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel, start: servers.Start) -> SGLangEngine:
    """A server that samples from `model`."""
    made: SGLangEngine = start(Path(model.config._name_or_path))
    return made
