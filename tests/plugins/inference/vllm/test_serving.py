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

from whet.models.load import load_policy, load_tokenizer
from whet.plugins.lessons.init_model import init_model

sys.path.append(str(Path(__file__).parents[2] / "serving"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
openai = pytest.importorskip("openai")
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "7+5"}], "max_tokens": 24}
IDS = {"return_token_ids": True}
OPTIONS = ("--option", "kv_cache_bytes=67108864", "--option", "threads=1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("models") / "model"
    init_model(folder, "qwen3", "nano", num_layers=2, max_position_embeddings=512)
    return load_policy(folder).eval()


@pytest.fixture(scope="module")
def client(has_vllm: None, model: PreTrainedModel) -> Iterator[Any]:
    from server_processes import started

    with started(model.config._name_or_path, "--name", "m", "--engine", "vllm", *OPTIONS) as running:
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


def test_models_and_errors(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    with pytest.raises(openai.NotFoundError, match="'other'") as missing:
        client.chat.completions.create(**{**CHAT, "model": "other"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match=r"\b512\b") as long:
        client.chat.completions.create(**{**CHAT, "max_tokens": 512})
    assert long.value.code == "context_length_exceeded"


def test_samples_of_a_chat_have_draws_of_their_own_from_its_seed(client: Any) -> None:
    def ask(seed: int, n: int = 3) -> Any:
        return client.chat.completions.create(**CHAT, seed=seed, n=n, logprobs=True, extra_body=IDS)

    response = ask(3)
    tokens = [choice.model_extra["token_ids"] for choice in response.choices]
    assert [choice.index for choice in response.choices] == [0, 1, 2] and len(set(map(tuple, tokens))) == 3
    assert response.usage.completion_tokens == sum(map(len, tokens))
    for choice, own in zip(response.choices, tokens, strict=True):
        assert len(choice.logprobs.content) == len(own)
    assert [choice.model_extra["token_ids"] for choice in ask(3).choices] == tokens
    assert ask(3, n=1).choices[0].model_extra["token_ids"] == tokens[0]  # alone as beside others
    assert [choice.model_extra["token_ids"] for choice in ask(4).choices] != tokens


def test_parts_have_the_log_probs_and_token_ids_of_the_whole(client: Any) -> None:
    options: dict[str, Any] = {**CHAT, "seed": 5, "n": 2, "logprobs": True, "extra_body": IDS}
    whole = client.chat.completions.create(**options)
    *chunks, end = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    assert end.usage == whole.usage and not end.choices
    for expected in whole.choices:
        parts = [each for chunk in chunks for each in chunk.choices if each.index == expected.index]
        ids = [token for part in parts for token in part.model_extra["token_ids"]]
        assert ids == expected.model_extra["token_ids"]
        assert [parts[0].model_extra["prompt_token_ids"]] == [expected.model_extra["prompt_token_ids"]]
        found = [each for part in parts if part.logprobs for each in part.logprobs.content]
        assert [each.token for each in found] == [each.token for each in expected.logprobs.content]
        wanted = [each.logprob for each in expected.logprobs.content]
        assert [each.logprob for each in found] == pytest.approx(wanted, abs=5e-6)


def test_a_stop_string_is_cut_from_the_text(client: Any) -> None:
    text = client.chat.completions.create(**CHAT, seed=3).choices[0].message.content
    stop = text[len(text) // 2 :][:2]
    cut = client.chat.completions.create(**CHAT, seed=3, stop=stop).choices[0]
    assert cut.message.content == text[: text.index(stop)] and cut.finish_reason == "stop"


def test_marks_that_are_tokens_reach_the_parser_of_tools(has_vllm: None, tmp_path: Path) -> None:
    from server_processes import started
    from test_tool_client import folder_of, said

    folder = folder_of("mistral", tmp_path / "model")
    mark = load_tokenizer(folder).convert_tokens_to_ids("[TOOL_CALLS]")
    forced: dict[str, Any] = {"max_tokens": 3, "extra_body": {"allowed_token_ids": [mark]}}
    with started(folder, "--name", "m", "--engine", "vllm", *OPTIONS) as running:
        create = running.client().chat.completions.create
        choice = create(**said("hi"), **forced).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("[TOOL_CALLS]" * 3, "length")  # no call is whole
        chunks = list(create(**said("hi"), **forced, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "[TOOL_CALLS]" * 3
        assert create(**{**said("hi"), "tools": []}, **forced).choices[0].message.content == ""
