# SPDX-License-Identifier: Apache-2.0
"""Tools of models of several formats, whose marks are special tokens, with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import openai
import pytest
from server_processes import ECHO, Running, Start, started
from test_answers import ADD, CALLS, MARKS

from whet.models.load import load_policy, load_tokenizer
from whet.plugins.lessons.init_model import init_model

pytestmark = pytest.mark.slow

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": ["integer", "null"]}}},
    },
}
# What a chat template of the format has in the place of <tool_call>; unset: this.
SIGNS = {"qwen3_coder": "<tool_call><function=", "llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
FORMATS = ("mistral", "hermes", "llama3_json", "qwen3_coder", "gpt-oss")


def folder_of(parser: str, path: Path) -> Path:
    """A random model that calls tools in this format; its marks are special tokens."""
    init_model(path, "qwen2.5", "nano", num_layers=2, max_position_embeddings=1024)
    model, tokenizer = load_policy(path), deepcopy(load_tokenizer(path))
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", *MARKS[parser]]})
    assert isinstance(tokenizer.chat_template, str)
    sign = SIGNS.get(parser, MARKS[parser][1] if parser == "gpt-oss" else "<tool_call>")
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_call>", sign).replace("</tool_call>", "")
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=FORMATS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Running]]:
    folder = folder_of(request.param, tmp_path_factory.mktemp("models") / "model")
    with started(folder, "--name", "m", "--engine", ECHO) as running:
        yield request.param, running


def said(text: str) -> dict[str, Any]:
    """A request that a server of the echo engine answers with this text."""
    return {"model": "m", "messages": [{"role": "user", "content": text}], "tools": [TOOL]}


def arguments_of(message: Any) -> list[dict[str, Any]]:
    return [json.loads(call.function.arguments) for call in message.tool_calls or ()]


def test_calls_whole_and_streamed(served: tuple[str, Running]) -> None:
    parser, server = served
    client, (call, between) = server.client(), CALLS[parser]
    calls = call if between is None else f"{call}{between}{call}"
    wanted, asked = [json.loads(ADD)] * (1 if between is None else 2), said(f"Let me see.\n{calls}")
    choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert arguments_of(choice.message) == wanted
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert (final.message.content, final.finish_reason) == ("Let me see.", "tool_calls")
    assert arguments_of(final.message) == wanted
    kinds = [event.type for event in events]
    assert kinds.count("content.delta") > 3  # before the calls
    assert kinds.index("tool_calls.function.arguments.done") > max(
        place for place, kind in enumerate(kinds) if kind == "content.delta"
    )
    # what the client got goes back as it is, with the results
    results = [{"role": "tool", "tool_call_id": each.id, "content": "3"} for each in choice.message.tool_calls or ()]
    again: Any = [*asked["messages"], choice.message, *results, {"role": "user", "content": "and?"}]
    assert client.chat.completions.create(**{**asked, "messages": again}).choices[0].message.content == "and?"
    one = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    assert arguments_of(one.message) == wanted[:1] and one.message.content == "Let me see."


def test_text_has_no_ends_and_malformed_calls_stay_text(served: tuple[str, Running]) -> None:
    parser, server = served
    client, (call, _) = server.client(), CALLS[parser]
    broken = call.replace("{", "{{").replace("</function>", "")
    for text, shown in (("It is 3.", "It is 3."), (f"So:\n{broken}", f"So:\n{broken.removesuffix('<|call|>')}")):
        choice = client.chat.completions.create(**said(text)).choices[0]
        assert (choice.message.content, choice.finish_reason) == (shown, "stop") and not choice.message.tool_calls
        parts = list(client.chat.completions.create(**said(text), stream=True))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == shown
        assert parts[-1].choices[0].finish_reason == "stop"
    # the tokens are all there, with the marks
    options: Any = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    choice = client.chat.completions.create(**said(call), **options).choices[0]
    tokens = [each.token for each in choice.logprobs.content or ()] if choice.logprobs else []
    assert "".join(tokens) == f"{call}<|im_end|>" and len((choice.model_extra or {})["token_ids"]) == len(tokens)
    unasked = client.chat.completions.create(**{**said(call), "tools": openai.omit}).choices[0]
    assert not unasked.message.tool_calls and unasked.finish_reason == "stop"


def test_a_parser_of_the_users_own(start: Start, qwen25_folder: Path, tmp_path: Path) -> None:
    parser = tmp_path / "mine.py"
    source = Path(__file__).parents[3] / "examples" / "extending" / "tool_parser.py"
    parser.write_text(source.read_text() + "\n\ndef broken(text, schemas):\n    raise KeyError('no such key')\n")
    client = start(qwen25_folder, "--name", "m", "--engine", ECHO, "--tool-parser", f"{parser}:lines").client()
    choice = client.chat.completions.create(**said('I add.\n!add {"a": 1}\nDone.')).choices[0]
    assert choice.message.content == "I add.Done." and arguments_of(choice.message) == [{"a": 1}]
    client = start(qwen25_folder, "--name", "m", "--engine", ECHO, "--tool-parser", f"{parser}:broken").client()
    with pytest.raises(openai.InternalServerError, match="broken failed: KeyError: 'no such key'") as error:
        client.chat.completions.create(**said("hi"))
    assert error.value.code == "tool_parser_failed"
    with pytest.raises(openai.APIError, match="broken failed"):
        list(client.chat.completions.create(**said("hi"), stream=True))
