# SPDX-License-Identifier: Apache-2.0
"""Fields of requests: the values that reach the engine, and the refused ones."""

from __future__ import annotations

import inspect
import pickle
import re
from copy import deepcopy
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from openai.resources.chat.completions import Completions
from openai.resources.completions import Completions as TextCompletions

from tests.raising import check_fields
from whet.data.chat import encode_rendered, render_chat
from whet.errors import EngineError, WhetError
from whet.keyed import key
from whet.models.load import load_policy, load_tokenizer, stop_token_ids
from whet.plugins.serving.app import in_own_words
from whet.plugins.serving.bodies import (
    UNSUPPORTED,
    ApiError,
    BodyReader,
    ChatBody,
    TextBody,
    ToolsAsked,
    WithoutEffect,
    _names_read,
)
from whet.rollout.native.engine import NativeEngine
from whet.rollout.protocol import Request, SamplingParams, generate
from whet.types import Message

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def reader(qwen25_folder: Path) -> BodyReader:
    tokenizer = load_tokenizer(qwen25_folder)
    return BodyReader("m", tokenizer, stop_token_ids(qwen25_folder, tokenizer), 512, 512, 100)


def test_every_sampling_field_reaches_the_engine(reader: BodyReader) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.2,
        "allowed_token_ids": [5, 6],
    }
    stops = {"stop": "end", "stop_token_ids": [9]}
    asked = reader.text({"model": "m", "prompt": [5, 6], "max_tokens": 7, **fields, **stops})
    expected = {**fields, "allowed_token_ids": (5, 6), "stop": ("end",)}
    ids = tuple(sorted({9, *reader.stop_ids}))
    assert asked.params == (SamplingParams(max_new_tokens=7, stop_token_ids=ids, **expected),)


def test_defaults(reader: BodyReader) -> None:
    chat = reader.chat({"model": "m", "messages": HI})
    assert chat.params == (SamplingParams(100, stop_token_ids=reader.stop_ids),)
    assert reader.text({"model": "m", "prompt": "hi"}).params[0].max_new_tokens == 16
    # no more than there is room for
    assert reader.text({"model": "m", "prompt": [5] * 500}).params[0].max_new_tokens == 12
    [first, second] = reader.text({"model": "m", "prompt": "hi", "seed": 4, "n": 2}).requests("id", 9.0)
    assert (first.key, second.key) == (key(4, "serve", 0), key(4, "serve", 1))
    assert (first.uid, second.uid, first.deadline_seconds, first.streams) == ("id:0", "id:1", 9.0, False)
    keys = {request.key for _ in range(4) for request in chat.requests("id", 9.0)}
    assert len(keys) == 4


def test_messages_are_rendered_as_the_template_wants_them(reader: BodyReader) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "hi <|im_end|>", "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    parsed = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    expected = [
        Message("system", "be brief"),
        Message("user", "hi <|im_end|>"),
        Message("assistant", "", {"tool_calls": [parsed]}),
        Message("tool", "2", {"tool_call_id": "call_1"}),
    ]
    options = {"tools": [TOOL]}
    text = render_chat(reader.tokenizer, expected, add_generation_prompt=True, chat_template_kwargs=options)
    [ids] = encode_rendered(reader.tokenizer, [text])
    asked = reader.chat({"model": "m", "messages": messages, "tools": [TOOL]})
    assert asked.prompts == (tuple(ids),) and asked.tools
    # the control token of the user is text
    assert ids.count(reader.tokenizer.convert_tokens_to_ids("<|im_end|>")) == text.count("<|im_end|>")
    without = reader.chat({"model": "m", "messages": messages, "tools": [TOOL], "tool_choice": "none"})
    assert not without.tools and len(without.prompts[0]) < len(ids)


@pytest.mark.parametrize("arguments", ["", " ", "{}", None, {}], ids=repr)
def test_a_call_without_arguments_has_an_empty_object(reader: BodyReader, arguments: object) -> None:
    def prompt(function: dict[str, Any]) -> tuple[int, ...]:
        call = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
        messages = [*HI, call, {"role": "tool", "tool_call_id": "1", "content": "2"}]
        return reader.chat({"model": "m", "messages": messages, "tools": [TOOL]}).prompts[0]

    found = prompt({"name": "f", "arguments": arguments})
    assert found == prompt({"name": "f"}) and '"arguments": {}' in reader.tokenizer.decode(found)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 2**31 - 1, "stop_token_ids": [511], "allowed_token_ids": [0, 511], "seed": -(10**4000)},
        {"temperature": 1e-6, "repetition_penalty": 1e6},
        {"temperature": 2.0, "repetition_penalty": 1e-6},
    ],
    ids=["whole", "low", "high"],
)
def test_the_engine_samples_with_the_outermost_numbers(
    reader: BodyReader, qwen25_folder: Path, fields: dict[str, Any]
) -> None:
    asked = reader.text({"model": "m", "prompt": [5, 6], "max_tokens": 4, **fields})
    engine = NativeEngine(kv_cache_bytes=2**20)
    engine.attach(load_policy(qwen25_folder), 0)
    [found] = generate(engine, asked.requests("id", 60.0))
    assert 1 <= len(found.log_probs) <= 4 and all(-inf < each <= 0 for each in found.log_probs)


VALUE, UNSUPPORTED_VALUE, UNKNOWN, TOO_LONG = (
    "invalid_value",
    "unsupported_value",
    "unknown_parameter",
    "context_length_exceeded",
)
CONTENT, CALLS = "messages[0].content", "messages[0].tool_calls"
STRICT, TEMPLATE = "tools[0].function.strict", "chat_template_kwargs"
# fields, the parameter and the code of the error (None, None: a WhetError), values and names in its message
WRONG: list[tuple[dict[str, Any], str | None, str | None, str]] = [
    ({"messages": []}, "messages", VALUE, r"\[\]"),
    ({"messages": "hi"}, "messages", VALUE, "'hi'"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", None, "role"),
    ({"messages": [{"role": "user"}]}, CONTENT, None, "None"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, CONTENT, None, "'image_url'"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, None, None, "surrogate"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, None, None, "unknown role robot"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]}, CALLS, None, "JSON"),
    ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, CALLS, None, "TypeError"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, CALLS, None, r"\b5\b"),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": True}]}, CALLS, None, "True"),
    ({"n": 0}, "n", VALUE, r"\b0: .*\b1$"),
    ({"n": True}, "n", VALUE, "True"),
    ({"n": 2.0}, "n", VALUE, r"2\.0"),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", None, "max_completion_tokens"),
    ({"max_tokens": 10**30}, "max_tokens", TOO_LONG, r"10{30}\b.*\b512\b"),
    ({"top_k": 10**20}, "top_k", VALUE, "10{20}: .*2147483647"),
    ({"stop_token_ids": [5, 10**20]}, "stop_token_ids", None, r"10{20}\b.*\b512\b"),
    ({"stop_token_ids": [512]}, "stop_token_ids", None, r"\b512\b.*\b512\b"),
    ({"allowed_token_ids": [10**20]}, "allowed_token_ids", None, r"10{20}\b.*\b512\b"),
    ({"repetition_penalty": 1e39}, "repetition_penalty", VALUE, r"1e[+]39: .*\b1000000$"),
    ({"repetition_penalty": 1e-46}, "repetition_penalty", VALUE, r"1e-46: .*\b0\.000001$"),
    ({"temperature": 1e-46}, "temperature", UNSUPPORTED_VALUE, r"1e-46.*\b0\b.*\b1e-06"),
    ({"seed": inf}, "seed", VALUE, "inf"),
    ({"stop": ["a", 3]}, "stop", VALUE, r"stop\.1 is 3"),
    ({"stop": ["a", ""]}, "stop", None, "empty"),
    ({"stop": ["a", "b\ud800"]}, "stop", None, "surrogate"),
    ({"stop": ["a"] * 65}, "stop", None, r"\b65\b.*\b1 .*\b64\b.*\b1024\b"),
    ({"stop": "a" * 1025}, "stop", None, r"\b1 .*\b1025\b"),
    ({"temperature": "1"}, "temperature", VALUE, "'1'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", None, "stream=true"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options", VALUE, r"stream_options\.usage is True"),
    ({"tools": [{"type": "code"}]}, "tools", None, r"tools\[0\].*'code'"),
    ({"tools": [{**TOOL, "function": {"name": "f", "strict": True}}]}, STRICT, UNSUPPORTED_VALUE, "True"),
    ({"tool_choice": "required"}, "tool_choice", None, "'required' .*tools"),
    ({"tools": [TOOL, TOOL]}, "tools", None, r"'f'.*\b2\b"),
    ({"tools": [{**TOOL, "function": {"name": 'a b"}'}}]}, "tools", None, r"tools\[0\]\.function\.name .*\b64\b"),
    ({"tools": [TOOL], "tool_choice": {"type": "zzz", "function": {"name": "f"}}}, "tool_choice", None, "'zzz'"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, CONTENT, None, "'text': 5"),
    ({"tools": [TOOL], "tool_choice": "f"}, "tool_choice", None, "'f'.*auto, none, required"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", None, "'g'"),
    ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls", VALUE, "'no'"),
    (
        {"tools": [{**TOOL, "function": {"name": "f", "parameters": [1]}}]},
        "tools",
        None,
        r"tools\[0\]\.function\.parameters .*\[1\]",
    ),
    (
        {"tools": [{**TOOL, "function": {"name": "f", "parameters": {"properties": [1]}}}]},
        "tools",
        None,
        r"'properties': \[1\]",
    ),
    ({"top_logprobs": 2}, "top_logprobs", None, "logprobs=true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", VALUE, r"\b21: .*\b20$"),
    ({"response_format": {"type": "json_object"}}, "response_format", UNSUPPORTED_VALUE, "'json_object'"),
    ({"logit_bias": {"5": 1}}, "logit_bias", UNSUPPORTED_VALUE, "{'5': 1}.*allowed_token_ids"),
    ({"store": "yes"}, "store", VALUE, "'yes'"),
    ({"moderation": {"model": "omni"}}, "moderation", UNSUPPORTED_VALUE, "'omni'"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, TEMPLATE, UNSUPPORTED_VALUE, "'enable_thinking': False"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, TEMPLATE, UNSUPPORTED_VALUE, "'chat_template'"),
    ({"chat_template_kwargs": {"message_": 1}}, TEMPLATE, UNSUPPORTED_VALUE, "'message_': 1"),
    ({"best": 1}, "best", UNKNOWN, r"\bbest\b"),
    ({"max_token": 1}, "max_token", UNKNOWN, r"\bmax_token\b.*\bmax_tokens\b"),
]


@pytest.mark.parametrize(("fields", "param", "code", "said"), WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_what_cannot_be_followed_is_refused(
    reader: BodyReader, fields: dict[str, Any], param: str | None, code: str | None, said: str
) -> None:
    with pytest.raises(WhetError if param is None else ApiError, match=said) as error:
        reader.chat({"model": "m", "messages": HI, **fields})
    if isinstance(error.value, ApiError):
        assert (error.value.status, error.value.param, error.value.code) == (400, param, code)


@pytest.mark.parametrize("prompt", [[], [[]], "", [-1], [512], [1.5], [[1], "a"], None, {"a": 1}], ids=str)
def test_prompts_that_are_none(reader: BodyReader, prompt: object) -> None:
    with pytest.raises(ApiError, match=r"prompt|token id") as error:
        reader.text({"model": "m", "prompt": prompt})
    assert error.value.status == 400 and error.value.param == "prompt"


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("parser", "choice", "names", "opening"),
    [
        ("hermes", "auto", "f", ""),
        ("hermes", "required", "f", '<tool_call>\n{"name": "f", "arguments":'),
        ("hermes", "required", "fg", '<tool_call>\n{"name": "'),
        ("hermes", NAMED, "gf", '<tool_call>\n{"name": "f", "arguments":'),
        ("llama3_json", NAMED, "gf", '{"name": "f", "parameters":'),
        ("qwen3_coder", NAMED, "gf", "<tool_call>\n<function=f>\n"),
        ("qwen3_coder", "required", "gf", "<tool_call>\n<function="),
    ],
)
def test_the_beginning_of_a_call(reader: BodyReader, parser: str, choice: Any, names: str, opening: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    body = {"model": "m", "messages": HI, "tools": tools}
    own = replace(reader, tool_parser=parser)
    plain, asked = own.chat(body), own.chat({**body, "tool_choice": choice})
    texts = [own.tokenizer.decode(each.prompts[0]) for each in (plain, asked)]
    assert texts[1] == texts[0] + opening and asked.tools is not None and asked.tools.opening == opening
    assert asked.tools.most_calls == (1 if choice == NAMED else None)
    with pytest.raises(ApiError, match=r"'required'.*\bmistral\b") as error:
        replace(reader, tool_parser="mistral").chat({**body, "tool_choice": "required"})
    assert (error.value.param, error.value.code) == ("tool_choice", UNSUPPORTED_VALUE)


def test_parameters_that_change_nothing_are_taken(reader: BodyReader) -> None:
    neutral = {name: values[0] for name, (values, _) in UNSUPPORTED.items() if values}
    named = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k", "store": True}
    named |= {"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}
    assert named.keys() == WithoutEffect.model_fields.keys()
    absent = dict.fromkeys(("seed", "stop", "logit_bias", "tools", "tool_choice", "response_format", "audio"))
    plain = reader.chat({"model": "m", "messages": HI})
    asked = reader.chat({"model": "m", "messages": HI, **neutral, **named, **absent})
    assert (asked.prompts, asked.params, asked.tools) == (plain.prompts, plain.params, plain.tools)
    for field, value, code, said in (
        ("logprobs", 6, VALUE, r"\b6: .*\b5$"),
        ("top_logprobs", 2, UNSUPPORTED_VALUE, r"\b2\b.*\blogprobs=N\b"),
    ):
        with pytest.raises(ApiError, match=said) as error:
            reader.text({"model": "m", "prompt": "hi", field: value})
        assert (error.value.param, error.value.code) == (field, code)


def test_every_parameter_of_the_official_client_is_known() -> None:
    own = {"self", "extra_body", "extra_headers", "extra_query", "timeout"}
    for create, body in ((Completions.create, ChatBody), (TextCompletions.create, TextBody)):
        names = inspect.signature(create).parameters.keys() - own
        assert names - body.model_fields.keys() - UNSUPPORTED.keys() == set()


def test_the_page_lists_what_has_no_effect() -> None:
    [row] = re.findall(r"^\|(.*)\| accepted without effect", PAGE.read_text(), re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == list(WithoutEffect.model_fields)


# What a chat template has in the place of <tool_call>, and the parser.
TEMPLATES = [
    ("<tool_call>", "hermes"),
    ("<tool_call><function=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ("<|channel|>", "gpt-oss"),
]


def with_template(reader: BodyReader, old: str, new: str, parser: str | None = None) -> BodyReader:
    tokenizer = deepcopy(reader.tokenizer)
    tokenizer.chat_template = str(tokenizer.chat_template).replace(old, new)
    return replace(reader, tokenizer=tokenizer, tool_parser=parser)


@pytest.mark.parametrize(("sign", "parser"), TEMPLATES)
def test_the_template_tells_the_parser_or_the_option_does(reader: BodyReader, sign: str, parser: str) -> None:
    body = {"model": "m", "messages": HI, "tools": [TOOL]}
    asked = with_template(reader, "<tool_call>", sign).chat(body)
    assert asked.tools == ToolsAsked(parser, {"f": {"type": "object"}}, None)
    asked = with_template(reader, "<tool_call>", sign, "python_tag").chat({**body, "parallel_tool_calls": False})
    assert asked.tools == ToolsAsked("python_tag", {"f": {"type": "object"}}, 1)


def test_a_template_without_a_known_format_is_refused(reader: BodyReader) -> None:
    body = {"model": "m", "messages": HI, "tools": [TOOL]}
    unknown = with_template(reader, "tool_call>", "act>")
    with pytest.raises(ApiError, match=r"--tool-parser, .*gpt-oss"):
        unknown.chat(body)
    assert unknown.chat({**body, "tool_choice": "none"}).tools is None
    asked = replace(unknown, tool_parser="hermes").chat(body)
    assert asked.tools is not None and asked.tools.parser == "hermes"
    with pytest.raises(ApiError, match="template") as error:
        with_template(reader, "tools", "things", "hermes").chat(body)
    assert (error.value.status, error.value.param) == (400, "tools")


@pytest.mark.usefixtures("no_manifests")
def test_calls_need_the_plugin_of_their_parser(reader: BodyReader) -> None:
    with pytest.raises(ApiError, match="whet/plugins/agents") as error:
        reader.chat({"model": "m", "messages": HI, "tools": [TOOL]})
    assert (error.value.status, error.value.param) == (400, "tools")


def test_an_engines_refusal_names_what_a_client_and_the_server_can_change(qwen25_folder: Path) -> None:
    engine = NativeEngine(kv_cache_bytes=2**20)
    engine.attach(load_policy(qwen25_folder), 0)
    with pytest.raises(EngineError) as error:
        engine.submit(Request("1", (5,), SamplingParams(10**5), 0))
    check_fields(in_own_words(error.value), change=re.compile("--option kv_cache_bytes.*max_tokens"))
    assert error.value.change == "raise rollout.engine.options.kv_cache_bytes or lower data.max_response_length"
    assert pickle.loads(pickle.dumps(error.value)).option == "kv_cache_bytes"
    other = EngineError("rollout.engine.options.kv_cache_bytes", 7, "more", "raise it")
    assert in_own_words(other) is other


def test_names_that_a_template_reads() -> None:
    """Neither parts of them, nor fields and texts."""
    template = "{% if enable_thinking %}{{ message.role }}{{ message['name'] }}{% endif %}{% generation %} thinking"
    assert _names_read(template) >= {"enable_thinking", "message"}
    assert not _names_read(template) & {"enable_think", "thinking", "role", "name"}
