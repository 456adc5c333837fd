# SPDX-License-Identifier: Apache-2.0
"""A vLLM server for each model, where there is an environment for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from whet.config.schema import ModelConfig
from whet.errors import ConfigError
from whet.models.init import Arch, init_model
from whet.models.load import load_policy, load_tokenizer
from whet.rollout.servers.environment import find_environment
from whet.rollout.vllm.engine import PACKAGE, VLLMEngine

CPU = torch.device("cpu")
SMALL = {"kv_cache_bytes": 2**26, "threads": 1}
Start = Callable[..., VLLMEngine]


@pytest.fixture(scope="session")
def has_vllm() -> None:
    """Skips where no environment with vLLM is found."""
    try:
        find_environment(PACKAGE, None)
    except ConfigError as error:
        pytest.skip(f"no environment with vLLM here: {error}")


@pytest.fixture(scope="module")
def start(has_vllm: None) -> Iterator[Start]:
    """Starts engines, and closes them at the end of the file."""
    started: list[VLLMEngine] = []

    def begin(folder: Path, dtype: torch.dtype = torch.float32, max_batch_size: int = 64, **options: Any) -> VLLMEngine:
        model = ModelConfig(path=str(folder))
        num_devices = options.pop("num_devices", 1)
        started.append(VLLMEngine(dtype, max_batch_size, CPU, model, num_devices, **{**SMALL, **options}))
        return started[-1]

    yield begin
    for engine in started:
        engine.close()


def random_model(folder: Path, arch: Arch, **options: Any) -> PreTrainedModel:
    """A random model of a context of 2,048 tokens, saved with a sharper choice, as new weights say nearly the same of
    every token. A Qwen2.5 gets a head of its own, the others' is tied to the embedding."""
    alphabet = None if arch == "qwen2.5" else "0123456789+-*/=() abcdefghijklmnopqrstuvwxyz<>"
    init_model(folder / "plain", arch, "nano", alphabet=alphabet, max_position_embeddings=2048, **options)
    model = load_policy(folder / "plain")
    with torch.no_grad():
        model.model.norm.weight.mul_(4)
        if arch == "qwen2.5":
            model.config.tie_word_embeddings = False
            head = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(1)) * 0.02
            model.lm_head.weight = torch.nn.Parameter(head)
    model.save_pretrained(folder / "sharp")
    load_tokenizer(folder / "plain").save_pretrained(folder / "sharp")
    return load_policy(folder / "sharp").eval()


@pytest.fixture(scope="module", params=["qwen3", "qwen2.5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    """A random model of 3 M parameters: with a tied head, and with biases and a head of its own."""
    return random_model(tmp_path_factory.mktemp("models"), request.param, hidden_size=192, num_layers=6)


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel, start: Start) -> VLLMEngine:
    """A server that samples from `model`."""
    return start(Path(model.config._name_or_path))
