# SPDX-License-Identifier: Apache-2.0
"""The official client against a server process, unchanged."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from server_processes import ECHO, Running, Start, started
from transformers import PreTrainedModel

from whet.models.load import load_policy, load_tokenizer
from whet.plugins.serving.answers import TokenTexts

pytestmark = pytest.mark.slow


def user(text: str) -> list[Any]:
    """The messages of a user who said this."""
    return [{"role": "user", "content": text}]


USER = user("what is 6*7")
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def server(qwen25_folder: Path) -> Iterator[Running]:
    with started(qwen25_folder, "--name", "m", "--max-running", 4) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").owned_by == "whet"
    with pytest.raises(openai.NotFoundError, match=r"'other'.*'m'") as error:
        client.models.retrieve("other")
    assert (error.value.code, error.value.param) == ("model_not_found", "model")


def test_chat(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "m", "messages": USER, "seed": 3, "max_completion_tokens": 12}
    response = client.chat.completions.create(**options, n=3, temperature=0.7, top_p=0.9, logprobs=True)
    assert [choice.index for choice in response.choices] == [0, 1, 2]
    assert response.object == "chat.completion" and response.system_fingerprint == "weights-0"
    assert response.usage is not None and response.usage.completion_tokens == sum(
        len(choice.logprobs.content or ()) for choice in response.choices if choice.logprobs
    )
    for choice in response.choices:
        assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
    assert len({choice.message.content for choice in response.choices}) == 3
    again = client.chat.completions.create(**options, n=3, temperature=0.7, top_p=0.9)
    assert [each.message for each in again.choices] == [each.message for each in response.choices]
    other = client.chat.completions.create(**{**options, "seed": 4}, n=3, temperature=0.7, top_p=0.9)
    assert [each.message for each in other.choices] != [each.message for each in response.choices]
    unseeded = [client.chat.completions.create(model="m", messages=USER, max_tokens=20) for _ in range(2)]
    assert unseeded[0].choices != unseeded[1].choices


@pytest.mark.parametrize("folder", ["qwen25_folder", "model_folder"])
def test_tokens_and_log_probs_are_the_models_own(folder: str, start: Start, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(folder)
    model, prompt = load_policy(path).eval(), [5, 9, 30, 12]
    response = (
        start(path, "--name", "m")
        .client()
        .completions.create(
            model="m", prompt=prompt, max_tokens=24, n=2, logprobs=0, seed=1, extra_body={"return_token_ids": True}
        )
    )
    for choice in response.choices:
        extra, log_probs = choice.model_extra, choice.logprobs
        assert extra is not None and log_probs is not None and extra["prompt_token_ids"] == prompt
        tokens = extra["token_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(own, torch.tensor(log_probs.token_logprobs), atol=1e-5)
        assert extra["weight_versions"] == [[0, len(tokens)]]


def test_prompts_in_every_form(client: openai.OpenAI, qwen25_folder: Path) -> None:
    tokenizer = load_tokenizer(qwen25_folder)
    texts = ["six times", "seven"]
    options: dict[str, Any] = {"model": "m", "max_tokens": 8, "seed": 0, "n": 2}
    forms: list[Any] = [texts, [tokenizer.encode(text) for text in texts]]
    found = [client.completions.create(prompt=prompt, **options) for prompt in forms]
    assert [choice.text for choice in found[0].choices] == [choice.text for choice in found[1].choices]
    assert [choice.index for choice in found[0].choices] == [0, 1, 2, 3]
    alone = client.completions.create(prompt=texts[1], **options)
    assert [choice.text for choice in alone.choices] == [choice.text for choice in found[0].choices[2:]]
    assert found[0].usage is not None and found[0].usage.prompt_tokens == sum(map(len, forms[1]))


def test_the_log_probs_of_a_prompt(server: Running, qwen25_folder: Path) -> None:
    """The log-probs equal the model's own forward, for the text's tokens and the three most probable ones; every sample
    has its prompt's."""
    tokenizer, model = load_tokenizer(qwen25_folder), load_policy(qwen25_folder)
    prompts = [tokenizer.encode(text) for text in ("six times", "seven", "s")]
    body = {"model": "m", "prompt": prompts, "max_tokens": 1, "n": 2, "prompt_logprobs": 3}
    choices = server.http().post("/v1/completions", json=body).json()["choices"]
    assert [choice["prompt_logprobs"] for choice in choices[::2]] == [each["prompt_logprobs"] for each in choices[1::2]]
    for ids, choice in zip(prompts, choices[::2], strict=True):
        with torch.no_grad():
            own = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        first, *places = choice["prompt_logprobs"]
        assert first is None and len(places) == len(ids) - 1
        for row, token, place in zip(own, ids[1:], places, strict=False):
            likeliest = {str(each) for each in row.topk(3).indices.tolist()}
            assert place.keys() == likeliest | {str(token)}
            for each, told in place.items():
                assert told["logprob"] == pytest.approx(float(row[int(each)]), abs=1e-4)
                assert told["decoded_token"] == tokenizer.decode([int(each)])
    refused = server.http().post("/v1/completions", json={**body, "stream": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_is_the_whole_response_in_parts(client: openai.OpenAI, temperature: float) -> None:
    options: dict[str, Any] = {
        "model": "m",
        "messages": USER,
        "seed": 5,
        "n": 2,
        "max_tokens": 40,
        "temperature": temperature,
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    assert len(chunks) > 20 and len({chunk.id for chunk in chunks}) == 1
    for index, expected in enumerate(whole.choices):
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(part.delta.content or "" for part in parts) == expected.message.content
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [expected.finish_reason]
        assert expected.logprobs is not None
        assert [each for part in parts if part.logprobs for each in part.logprobs.content or ()] == (
            expected.logprobs.content
        )
        ids = [token for part in parts for token in (part.model_extra or {})["token_ids"]]
        assert ids == (expected.model_extra or {})["token_ids"]
        assert ["prompt_token_ids" in (part.model_extra or {}) for part in parts] == [True] + [False] * (len(parts) - 1)


def test_a_streamed_text(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "m", "prompt": "one", "seed": 5, "max_tokens": 30, "logprobs": 0}
    whole = client.completions.create(**options).choices[0]
    parts = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
    assert "".join(part.text for part in parts) == whole.text and len(parts) > 10
    for name in ("tokens", "token_logprobs", "text_offset"):
        joined = [each for part in parts if part.logprobs for each in getattr(part.logprobs, name)]
        assert joined == getattr(whole.logprobs, name)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}], ids=str)
def test_a_call_that_is_begun_for_the_model(echo: Running, choice: Any) -> None:
    """The model writes the rest of the call; text that becomes no call stays text, with its beginning."""
    create = echo.client().chat.completions.create
    rest, begun = ' {"a": 1, "b": 2}}\n</tool_call>', '<tool_call>\n{"name": "add", "arguments":'
    more = '\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    options: dict[str, Any] = {"model": "m", "tools": [ADD], "tool_choice": choice}
    found = create(messages=user(rest + more), **options).choices[0]
    assert found.finish_reason == "tool_calls" and found.message.content is None and found.message.tool_calls
    calls = [each.function.arguments for each in found.message.tool_calls if each.type == "function"]
    assert calls == ['{"a": 1, "b": 2}', "{}"][: 2 if choice == "required" else 1]
    chunks = list(create(messages=user(rest), stream=True, **options))
    parts = [each.choices[0] for each in chunks]
    [streamed] = [call for part in parts for call in part.delta.tool_calls or ()]
    assert streamed.function and (streamed.function.name, streamed.function.arguments) == ("add", calls[0])
    assert parts[-1].finish_reason == "tool_calls" and not any(part.delta.content for part in parts)
    text = create(messages=user(" I do not know"), **options).choices[0]
    assert (text.message.content, text.message.tool_calls) == (f"{begun} I do not know", None)
    assert text.finish_reason == "stop"


def test_log_probs_of_the_likeliest_tokens(client: openai.OpenAI, qwen25_folder: Path) -> None:
    """The log-probs equal the model's own forward, for chats and texts, whole and in parts; the tokens are the same."""
    model, tokenizer = load_policy(qwen25_folder).eval(), load_tokenizer(qwen25_folder)
    texts = TokenTexts(tokenizer)
    ids: dict[str, Any] = {"model": "m", "seed": 2, "max_tokens": 6, "extra_body": {"return_token_ids": True}}
    chat: dict[str, Any] = {**ids, "messages": USER, "logprobs": True, "temperature": 0.7}
    plain = client.chat.completions.create(**chat).choices[0]
    whole = client.chat.completions.create(**chat, top_logprobs=3).choices[0]
    parts = [each.choices[0] for each in client.chat.completions.create(**chat, top_logprobs=3, stream=True)]
    assert whole.message == plain.message and plain.logprobs and whole.logprobs and whole.logprobs.content
    assert [each.top_logprobs for each in plain.logprobs.content or ()] == [[]] * len(whole.logprobs.content)
    assert [each for part in parts if part.logprobs for each in part.logprobs.content or ()] == whole.logprobs.content
    for place, best in zip(whole.logprobs.content, _likeliest(model, whole.model_extra, 3, 0.7), strict=True):
        assert [each.logprob for each in place.top_logprobs] == pytest.approx([each for _, each in best], abs=1e-5)
        shown = [texts[token] for token, _ in best]
        assert [(each.token, tuple(each.bytes or ())) for each in place.top_logprobs] == shown
    text: dict[str, Any] = {**ids, "prompt": "six times"}
    full = client.completions.create(**text, logprobs=2).choices[0]
    streamed = [each.choices[0].logprobs for each in client.completions.create(**text, logprobs=2, stream=True)]
    assert full.logprobs and full.logprobs.top_logprobs
    assert [each for part in streamed if part for each in part.top_logprobs or ()] == full.logprobs.top_logprobs
    columns = full.logprobs.tokens or (), full.logprobs.token_logprobs or (), full.logprobs.top_logprobs
    for token, log_prob, found, best in zip(*columns, _likeliest(model, full.model_extra, 2, 1.0), strict=True):
        expected = {texts[each].text: value for each, value in reversed(best)}
        assert found == pytest.approx({token: log_prob, **expected}, abs=1e-5) and len(found) in (2, 3)


@pytest.mark.parametrize("streams", [False, True])
def test_an_engine_without_the_likeliest_tokens(echo: Running, streams: bool) -> None:
    client = echo.client()
    with pytest.raises(openai.BadRequestError, match="top_logprobs=2") as cannot:
        client.chat.completions.create(model="m", messages=USER, logprobs=True, top_logprobs=2, stream=streams)
    assert cannot.value.code == "unsupported_value" and cannot.value.param == "top_logprobs"
    with pytest.raises(openai.BadRequestError, match="logprobs=1") as cannot:
        client.completions.create(model="m", prompt="hi", logprobs=1, stream=streams)
    assert cannot.value.code == "unsupported_value" and cannot.value.param == "logprobs"


def _likeliest(model: PreTrainedModel, extra: Any, count: int, temperature: float) -> list[list[tuple[int, float]]]:
    """The likeliest tokens in each place of a response, by the model's own forward."""
    prompt, tokens = extra["prompt_token_ids"], extra["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    best = (logits / temperature).log_softmax(-1).topk(count)
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]


def test_sixteen_clients_get_what_they_get_alone(server: Running) -> None:
    def ask(number: int) -> object:
        options: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go on" * (number % 5)}]}
        options |= {"seed": number, "max_tokens": 10 + 2 * number, "extra_body": {"return_token_ids": True}}
        with server.client() as own:
            if number % 2:
                return (own.chat.completions.create(**options).choices[0].model_extra or {})["token_ids"]
            chunks = own.chat.completions.create(**options, stream=True)
            return [token for chunk in chunks for token in (chunk.choices[0].model_extra or {})["token_ids"]]

    alone = [ask(number) for number in range(16)]
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(ask, range(16))) == alone


def test_stop_strings_are_cut_from_the_text_and_not_from_the_tokens(echo: Running) -> None:
    client = echo.client()
    options: dict[str, Any] = {
        "model": "m",
        "messages": user("one two three four"),
        "extra_body": {"return_token_ids": True},
    }
    for stop in ("three", ["never", "o thr"]):
        choice = client.chat.completions.create(**options, stop=stop).choices[0]
        end = "one two " if stop == "three" else "one tw"
        assert (choice.message.content, choice.finish_reason) == (end, "stop")
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stop=stop, stream=True)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == end
        tokens = [token for chunk in chunks for token in (chunk.model_extra or {})["token_ids"]]
        assert tokens == (choice.model_extra or {})["token_ids"] and len(tokens) > len(end) // 4
    whole = client.chat.completions.create(**options, stop="absent").choices[0]
    assert (whole.message.content, whole.finish_reason) == ("one two three four", "stop")


def test_a_stream_has_no_half_characters(echo: Running) -> None:
    text = "é — 你好 👩‍👩‍👧 ok"
    chunks = list(echo.client().chat.completions.create(model="m", messages=user(text), stream=True))
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(parts) == text and "\N{REPLACEMENT CHARACTER}" not in "".join(parts) and len(parts) > 8


def test_an_asynchronous_client(echo: Running) -> None:
    async def ask(text: str) -> str:
        async with openai.AsyncOpenAI(base_url=f"{echo.address}/v1", api_key="any", max_retries=0) as client:
            chunks = await client.chat.completions.create(model="m", messages=user(text), stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def ask_all(texts: list[str]) -> list[str]:
        return await asyncio.gather(*map(ask, texts))

    texts = ["one", "two three", "four"]
    assert asyncio.run(ask_all(texts)) == texts


def test_tools(echo: Running) -> None:
    client = echo.client()
    options: dict[str, Any] = {"model": "m", "messages": user(CALLS), "tools": [ADD]}
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    with client.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds and final.finish_reason == "tool_calls"
    assert final.message.content == "Let me see."
    assert [json.loads(call.function.arguments) for call in final.message.tool_calls or ()] == [
        {"a": 1, "b": 2},
        {"a": 3, "b": 4},
    ]
    # what the client got goes back as it is, with the results
    results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
    again = client.chat.completions.create(**{**options, "messages": [*user(CALLS), choice.message, *results]})
    assert "<tool_response>\n3\n</tool_response>" in (again.choices[0].message.content or "")
    plain = client.chat.completions.create(**options, tool_choice="none").choices[0]
    assert plain.message.content == CALLS and not plain.message.tool_calls and plain.finish_reason == "stop"


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    ask = client.chat.completions.create
    with pytest.raises(openai.NotFoundError, match="'gpt-5'") as missing:
        ask(model="gpt-5", messages=USER)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError, match=r"3\.0") as wrong:
        ask(model="m", messages=USER, temperature=3.0)
    assert wrong.value.code == "invalid_value" and wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match=r"\b510\b.*\b512\b") as long:
        ask(model="m", messages=USER, max_tokens=510)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature") as unknown:
        ask(model="m", messages=USER, extra_body={"temprature": 1})
    assert unknown.value.code == "unknown_parameter" and unknown.value.param == "temprature"


@pytest.mark.parametrize("is_option", [True, False], ids=["option", "variable"])
def test_an_api_key(start: Start, qwen25_folder: Path, is_option: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_option:
        monkeypatch.setenv("WHET_API_KEY", "secret-1")
    words = ["--api-key", "secret-1"] if is_option else []
    server = start(qwen25_folder, "--name", "m", "--engine", ECHO, *words)
    other = server.client(api_key="secret-2")
    with pytest.raises(openai.AuthenticationError, match="Authorization: Bearer") as error:
        list(other.models.list())
    assert error.value.code == "invalid_api_key"
    for refused in (
        lambda: other.chat.completions.create(model="m", messages=USER, stream=True),
        lambda: other.completions.create(model="m", prompt="hi"),
    ):
        with pytest.raises(openai.AuthenticationError):
            refused()
    assert server.client(api_key="secret-1").models.retrieve("m").id == "m"
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok"} and http.get("/metrics").status_code == 401
        assert http.get("/v1/models", headers={"authorization": b"Bearer s\xe9cret"}).status_code == 401


def test_it_listens_on_this_machine_alone(echo: Running) -> None:
    port = int(echo.address.rpartition(":")[2])
    with pytest.raises(OSError):  # an address of this machine too
        socket.create_connection(("127.0.0.2", port), timeout=5)
    assert echo.address == f"http://127.0.0.1:{port}" and not any("anyone who reaches" in line for line in echo.lines)


def test_it_listens_on_every_network_when_told(start: Start, qwen25_folder: Path) -> None:
    server = start(qwen25_folder, "--name", "m", "--engine", ECHO, "--host", "0.0.0.0")
    server.wait_for(r"anyone who reaches 0\.0\.0\.0:\d+ .*--api-key KEY")
    port = server.address.rpartition(":")[2]
    assert httpx.get(f"http://127.0.0.2:{port}/health").json() == {"status": "ok"}


def test_any_engine(start: Start, qwen25_folder: Path) -> None:
    client = start(qwen25_folder, "--name", "m", "--engine", "hf").client()
    options: dict[str, Any] = {"model": "m", "prompt": "one", "seed": 1, "max_tokens": 12}
    parts = [chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)]
    assert "".join(parts) == client.completions.create(**options).choices[0].text and len(parts) > 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(start: Start, number: int, qwen25_folder: Path) -> None:
    server, text = start(qwen25_folder, "--name", "m", "--engine", ECHO), "slow one two three four five"
    chunks = server.client().chat.completions.create(model="m", messages=user(text), stream=True)
    found = next(chunks).choices[0].delta.content or ""
    server.process.send_signal(number)
    found += "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert found == text  # what runs is ended
    status, printed = server.ended()
    assert status == 0 and "Traceback" not in printed, printed
