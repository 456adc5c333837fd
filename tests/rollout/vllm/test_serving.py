# SPDX-License-Identifier: Apache-2.0
"""vLLM behind `whet serve`, with the official client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from whet.models.init import init_model
from whet.models.load import load_policy

sys.path.append(str(Path(__file__).parents[2] / "serving"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
openai = pytest.importorskip("openai")
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "7+5"}], "max_tokens": 24}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("models") / "model"
    init_model(folder, "qwen3", "nano", num_layers=2, max_position_embeddings=512)
    return load_policy(folder).eval()


@pytest.fixture(scope="module")
def client(has_vllm: None, model: PreTrainedModel) -> Iterator[Any]:
    from server_processes import started

    options = ("--option", "kv_cache_bytes=67108864", "--option", "threads=1")
    with started(model.config._name_or_path, "--name", "m", "--engine", "vllm", *options) as running:
        yield running.client()


def test_log_probs_are_the_models_own(client: Any, model: PreTrainedModel) -> None:
    prompt = [5, 9, 30, 12]
    response = client.completions.create(
        model="m", prompt=prompt, max_tokens=24, n=2, logprobs=0, seed=1, extra_body={"return_token_ids": True}
    )
    assert [choice.index for choice in response.choices] == [0, 1]
    for choice in response.choices:
        tokens = choice.model_extra["token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(own, torch.tensor(choice.logprobs.token_logprobs), atol=1e-5)
        assert choice.model_extra["weight_versions"] == [[0, len(tokens)]]


def test_a_stream_is_the_whole_response_in_parts(client: Any) -> None:
    whole = client.chat.completions.create(**CHAT, seed=3).choices[0]
    chunks = list(client.chat.completions.create(**CHAT, seed=3, stream=True))
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(parts) == whole.message.content and sum(map(bool, parts)) > 3
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason


def test_a_stop_string_is_cut_from_the_text(client: Any) -> None:
    text = client.chat.completions.create(**CHAT, seed=3).choices[0].message.content
    stop = text[len(text) // 2 :][:2]
    cut = client.chat.completions.create(**CHAT, seed=3, stop=stop).choices[0]
    assert cut.message.content == text[: text.index(stop)] and cut.finish_reason == "stop"
