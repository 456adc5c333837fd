# SPDX-License-Identifier: Apache-2.0
"""An SGLang server, where there is an environment for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from whet.config.schema import ModelConfig
from whet.errors import ConfigError
from whet.models.init import init_model
from whet.models.load import load_policy
from whet.rollout.servers.environment import find_environment
from whet.rollout.sglang.engine import PACKAGE, SGLangEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A random model of a context of 2,048 tokens, with a sharper choice than new weights make."""
    folder = tmp_path_factory.mktemp("models")
    init_model(folder, "qwen3", "nano", alphabet="0123456789+-*/=() abcdefgh", max_position_embeddings=2048)
    made = load_policy(folder)
    with torch.no_grad():
        made.model.norm.weight.mul_(4)
    made.save_pretrained(folder)
    return load_policy(folder).eval()


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Iterator[SGLangEngine]:
    """A server that samples from `model`."""
    try:
        find_environment(PACKAGE, None)
    except ConfigError as error:
        pytest.skip(f"no environment with SGLang here: {error}")
    config = ModelConfig(path=model.config._name_or_path)
    made = SGLangEngine(torch.float32, 64, torch.device("cpu"), config, kv_cache_bytes=2**26, threads=1)
    yield made
    made.close()
