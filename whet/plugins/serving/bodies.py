# SPDX-License-Identifier: Apache-2.0
"""Checks the bodies of HTTP requests, and converts them to prompts and sampling parameters. Errors have the form of the
OpenAI API.

No parameter is silently ignored: an unsupported parameter is an error, unless its value has no effect."""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import yaml
from jinja2 import Environment
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from transformers import PreTrainedTokenizerBase

from whet.data.chat import check_message, encode_rendered, encode_texts, render_chat
from whet.environments.calls import parser_of
from whet.errors import did_you_mean
from whet.keyed import key
from whet.manifests import absent, missing_plugin
from whet.registry import TOOL_PARSERS
from whet.rollout.protocol import Request, SamplingParams
from whet.types import Message

ERROR_TYPES = {429: "rate_limit_error", 504: "timeout_error"}  # by status; other statuses share two types
MAX_CHOICES = 128  # n
MAX_STOPS, MAX_STOP = 64, 1024  # strings, characters of each: all are compared with every piece of a stream
CHARACTERS_PER_TOKEN = 10  # of a context; more are refused before they are encoded
MAX_TOP_K = 2**31 - 1  # engines hold it as int32
MIN_TEMPERATURE = 1e-6  # above 0: logits / temperature, with penalties, stay far inside of float32
DEFAULT_TEXT_TOKENS = 16  # max_tokens of /v1/completions, as in the API
# Parameters of the API that the server cannot follow: the values that change nothing, and the reason.
UNSUPPORTED: dict[str, tuple[list[Any], str]] = yaml.safe_load(Path(__file__).with_name("unsupported.yaml").read_text())
MAX_LIKELIEST = 1024  # tokens in each place of a prompt
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
RESERVED = ("add_generation_prompt", "chat_template", "continue_final_message", "messages", "tokenize", "tools")
SAMPLED = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
Raw = dict[str, Any]  # an object of JSON
B = TypeVar("B", bound="Body")
Whole = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0)]


class ApiError(Exception):
    """An error for the client: the HTTP status, a message, the invalid parameter, and a code for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_dict(self) -> Raw:
        """Returns the body of the error response."""
        kind = ERROR_TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """Returns an error for a parameter that the client has to change."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, value: object, why: str) -> ApiError:
    """Returns an error for a parameter, or for one of its values, that this server does not support."""
    return refused(param, f"{param}={value!r:.80} is not supported: {why}", "unsupported_value")


class StreamOptions(BaseModel):
    """The field stream_options."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class WithoutEffect(BaseModel):
    """Fields that are accepted but have no effect: identifiers of the client, and settings of OpenAI's storage."""

    model_config = ConfigDict(extra="forbid", strict=True)
    user: str | None = None
    safety_identifier: str | None = None
    metadata: Raw | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Raw | None = None
    prompt_cache_retention: str | None = None


class Body(WithoutEffect):
    """The fields that chat and text requests share."""

    model: str
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    max_tokens: Whole | None = None
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    seed: int | None = None
    stop: list[str] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    # not in the API
    top_k: int = Field(0, ge=0, le=MAX_TOP_K)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(1.0, ge=1e-6, le=1e6)
    stop_token_ids: list[TokenId] = []
    allowed_token_ids: list[TokenId] | None = None
    return_token_ids: bool = False
    prompt_field: ClassVar[str]  # which an error about the prompt names
    likeliest_field: ClassVar[str]

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_several(cls, stop: object) -> object:
        return [stop] if isinstance(stop, str) else stop

    @property
    def likeliest(self) -> int | None:
        """The number of most probable tokens to report beside the sampled token; None: no log-probs at all."""
        raise NotImplementedError


class ChatBody(Body):
    """The body of /v1/chat/completions."""

    messages: list[Raw] = Field(min_length=1)
    max_completion_tokens: Whole | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[Raw] = []
    tool_choice: object = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: Raw = {}
    prompt_field, likeliest_field = "messages", "top_logprobs"

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class TextBody(Body):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: int | None = Field(None, ge=0, le=5)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)  # vLLM's
    prompt_field, likeliest_field = "prompt", "logprobs"

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


@dataclass(frozen=True)
class ToolsAsked:
    """The tools that a request offers to the model, and the parser of their calls."""

    parser: str  # of their calls
    schemas: Mapping[str, Raw]  # of the arguments, by name of the tool
    most_calls: int | None  # in a response
    opening: str = ""  # of a call, with which the response must begin; the end of the prompt


@dataclass(frozen=True)
class ClientRequest:
    """A checked request from a client."""

    body: ChatBody | TextBody
    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]  # of each prompt
    tools: ToolsAsked | None = None  # set: the response may have calls

    @property
    def include_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    def requests(self, uid: str, deadline_seconds: float) -> list[Request]:
        """Returns the engine's requests, n for each prompt. Samples draw differently; equal seeds repeat the draws."""
        n, seed = self.body.n, secrets.randbits(62) if self.body.seed is None else self.body.seed
        return [
            Request(
                uid=f"{uid}:{number * n + sample}",
                prompt_ids=prompt,
                params=params,
                key=key(seed, "serve", sample),
                deadline_seconds=deadline_seconds,
                streams=self.body.stream,
            )
            for number, (prompt, params) in enumerate(zip(self.prompts, self.params, strict=True))
            for sample in range(n)
        ]


@dataclass(frozen=True)
class BodyReader:
    """Reads the bodies of requests to one model."""

    name: str
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    context: int  # tokens of prompt and response together
    vocab_size: int
    max_tokens: int  # of a response whose request names no limit
    tool_parser: str | None = None  # unset: that of the chat template
    most_samples: int = sys.maxsize  # of a request

    def chat(self, raw: object) -> ClientRequest:
        """Reads a request for a chat completion.  Raises: ApiError, DataError."""
        body = self._checked(ChatBody, raw)
        self._check_size("messages", body.n, [body.messages, body.tools, body.chat_template_kwargs])
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise refused("max_tokens", "max_tokens and max_completion_tokens are both set; set one")
        if body.top_logprobs and not body.logprobs:
            raise refused("top_logprobs", "top_logprobs is set without logprobs=true")
        if body.tool_choice not in (None, "auto", "none") and not body.tools:
            raise refused("tool_choice", f"tool_choice is {body.tool_choice!r:.80} without tools")
        tools = [] if body.tool_choice == "none" else [_tool(index, each) for index, each in enumerate(body.tools)]
        names = [tool["function"]["name"] for tool in tools]
        if twice := [name for name in names if names.count(name) > 1]:
            found = f"tools has {twice[0]!r} {names.count(twice[0])} times"
            raise refused("tools", f"{found}; give each tool a name of its own")
        messages = [_message(index, each) for index, each in enumerate(body.messages)]
        template = self.tokenizer.get_chat_template(None, tools or None) if self.tokenizer.chat_template else ""
        asked = self._tools(template, tools, body) if tools else None
        opening = "" if asked is None else asked.opening
        prompt = self._rendered(template, messages, tools, body.chat_template_kwargs, opening)
        params = self._params(body, prompt, body.max_completion_tokens or body.max_tokens, self.max_tokens)
        return ClientRequest(body, (tuple(prompt),), (params,), asked)

    def text(self, raw: object) -> ClientRequest:
        """Reads a request for a completion of text or token ids.  Raises: ApiError, DataError."""
        body = self._checked(TextBody, raw)
        if body.stream and body.prompt_logprobs is not None:
            raise unsupported("prompt_logprobs", body.prompt_logprobs, "a stream has no place for them; leave it out")
        given: Any = body.prompt
        if isinstance(given, str) or not given or isinstance(given[0], int):
            given = [given]
        self._check_size("prompt", body.n * len(given))
        if isinstance(given[0], str):
            for each in given:
                self._check_size("prompt", body.n, each)
            given = encode_texts(self.tokenizer, given, add_special_tokens=True)
        params = [self._params(body, prompt, body.max_tokens, DEFAULT_TEXT_TOKENS) for prompt in given]
        return ClientRequest(body, tuple(map(tuple, given)), tuple(params))

    def _checked(self, kind: type[B], raw: object) -> B:
        """Checks the fields of a body and the model that it names, and returns the body."""
        if not isinstance(raw, dict):
            raise ApiError(400, f"the body is a JSON {type(raw).__name__}; expected an object")
        given = {name: value for name, value in raw.items() if value is not None}
        for name in [name for name in given if name in UNSUPPORTED and name not in kind.model_fields]:
            neutral, why = UNSUPPORTED[name]
            if not any(value == given[name] and type(value) is type(given[name]) for value in neutral):
                raise unsupported(name, given[name], why)
            del given[name]
        for unknown in [name for name in given if name not in kind.model_fields]:
            name, hint = ascii(unknown)[1:-1], did_you_mean(unknown, kind.model_fields, "remove it", quoted=False)
            raise refused(name, f"unknown parameter {name}; {hint}", "unknown_parameter")
        try:
            body = kind.model_validate(given)
        except ValidationError as error:
            raise _invalid(error) from error
        if body.model != self.name:
            message = f"the model {body.model!r} does not exist; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if body.stream_options is not None and not body.stream:
            raise refused("stream_options", "stream_options is set without stream=true")
        return body

    def _check_size(self, param: str, samples: int, texts: object = "") -> None:
        """Raises: ApiError for more samples than the server accepts, and for a prompt that is too long in any
        encoding."""
        if samples > self.most_samples:
            raise refused("n", f"the request asks for {samples} samples; the server takes {self.most_samples}")
        characters, most = len(json.dumps(texts, ensure_ascii=False)), self.context * CHARACTERS_PER_TOKEN
        if characters > most:
            found = f"{param} has {characters:,} characters; {self.context} tokens hold {most:,} at most: shorten it"
            raise refused(param, found, "context_length_exceeded")

    def _rendered(
        self, template: str, messages: list[Message], tools: list[Raw], extra: Raw, opening: str
    ) -> list[int]:
        for name in extra:
            if name in RESERVED or name not in _names_read(template):
                why = "the chat template of this model ignores it"
                raise unsupported("chat_template_kwargs", {name: extra[name]}, why)
        options = {**extra, **({"tools": tools} if tools else {})}
        text = render_chat(self.tokenizer, messages, add_generation_prompt=True, chat_template_kwargs=options)
        [ids] = encode_rendered(self.tokenizer, [text + opening])
        return ids

    def _tools(self, template: str, tools: list[Raw], body: ChatBody) -> ToolsAsked:
        """Returns the tools with the parser of their calls.  Raises: ApiError if the model cannot call tools."""
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        if "tools" not in template:
            raise unsupported("tools", [*schemas], "the chat template does not show tools to the model; leave them out")
        if (parser := self.tool_parser or parser_of(template)) is None:
            known = f"one of {', '.join(TOOL_PARSERS.names())}, or your own as path/file.py:function"
            why = f"the chat template shows no known format of calls; start the server with --tool-parser, {known}"
            raise unsupported("tools", [*schemas], why)
        if plugin := missing_plugin("tool_parser", parser):
            raise unsupported("tools", [*schemas], str(absent(f"tool parser {parser}", plugin)))
        opening, is_named = _opening(parser, [*schemas], body.tool_choice), isinstance(body.tool_choice, dict)
        return ToolsAsked(parser, schemas, None if body.parallel_tool_calls and not is_named else 1, opening)

    def _params(self, body: Body, prompt: Sequence[int], limit: int | None, default: int) -> SamplingParams:
        """Returns the sampling parameters of one prompt."""
        room = self.context - len(prompt)
        if not prompt:
            raise refused("prompt", "the prompt is empty; it needs one token or more")
        named = {"stop_token_ids": body.stop_token_ids, "allowed_token_ids": body.allowed_token_ids or []}
        for name, ids in {"prompt": prompt, **named}.items():
            if (highest := max(ids, default=0)) >= self.vocab_size:
                found = f"token id {highest} of {name} is outside the vocabulary"
                raise refused(name, f"{found}; the model has token ids below {self.vocab_size}")
        if 0 < body.temperature < MIN_TEMPERATURE:
            why = f"float32 cannot hold what it gives; set 0, which is greedy, or {MIN_TEMPERATURE:g} or more"
            raise unsupported("temperature", body.temperature, why)
        if room < (limit or 1):
            found = (
                f"the prompt has {len(prompt)} tokens and the response may have {limit or 1}, over the model's context "
                f"of {self.context} tokens; shorten the prompt or lower max_tokens"
            )
            raise refused("max_tokens" if room > 0 else body.prompt_field, found, "context_length_exceeded")
        stop = body.stop
        if len(stop) > MAX_STOPS or max(map(len, stop), default=0) > MAX_STOP:
            found = f"{len(stop)} strings, the longest of {max(map(len, stop))} characters"
            raise refused("stop", f"stop has {found}; expected at most {MAX_STOPS} of at most {MAX_STOP} characters")
        if "" in stop:
            raise refused("stop", "stop has an empty string; leave it out")
        if any("\ud800" <= character <= "\udfff" for character in "".join(stop)):
            raise refused("stop", "stop has half of a surrogate pair, which has no encoding; remove it")
        return SamplingParams(
            max_new_tokens=limit or min(room, default),
            stop_token_ids=tuple(sorted({*self.stop_ids, *body.stop_token_ids})),
            stop=tuple(stop),
            allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
            num_likeliest=body.likeliest or 0,
            **body.model_dump(include=SAMPLED),
        )


@lru_cache(maxsize=4)
def _names_read(template: str) -> frozenset[str]:
    """Returns the names that a chat template's code reads, without attribute names after a dot."""
    tokens = [(kind, text) for _, kind, text in Environment().lex(template) if kind != "whitespace"]
    pairs = zip([("", ""), *tokens], tokens, strict=False)
    return frozenset(text for (_, before), (kind, text) in pairs if kind == "name" and before != ".")


def _invalid(error: ValidationError) -> ApiError:
    """Returns the error for the first invalid field."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    if first["type"] == "missing":
        return refused(name, f"{name} is missing", "missing_required_parameter")
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "constrained")))
    message = f"{where} is {first['input']!r:.80}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return refused(name, message, "invalid_value")


def _tool(index: int, raw: Raw) -> Raw:
    """Converts a tool to the form that the template reads."""
    where = f"tools[{index}]"
    match raw:
        case {"type": "function", "function": {"name": str(name)} as function}:
            schema = function.get("parameters") or {}
        case _:
            raise refused("tools", f"{where} is {raw!r:.80}; expected type function and a function with a name")
    if not TOOL_NAME.fullmatch(name):
        found = f"{where}.function.name is {name!r:.80}"
        raise refused("tools", f"{found}; expected 1 to 64 letters, digits, underscores and dashes")
    if not isinstance(schema, dict) or not isinstance(schema.get("properties", {}), dict):
        found = f"{where}.function.parameters is {schema!r:.80}"
        raise refused("tools", f"{found}; expected a JSON schema, an object whose properties are one")
    if function.get("strict"):
        raise unsupported(f"{where}.function.strict", True, UNSUPPORTED["response_format"][1])
    return {"type": "function", "function": {name: each for name, each in function.items() if name != "strict"}}


def _opening(parser: str, names: Sequence[str], choice: object) -> str:
    """Returns the text that begins a call of the chosen tool, or of any tool; empty if the model may choose.  Raises:
    ApiError."""
    match choice:
        case None | "auto":
            return ""
        case "required":
            pass
        case {"type": "function", "function": {"name": name}} if name in names:
            names = [name]
        case _:
            known = "auto, none, required, or type function and a function with the name of one of the tools"
            raise refused("tool_choice", f"tool_choice is {choice!r:.80}; expected {known}")
    if (opening := TOOL_PARSERS[parser].marks.get("opening")) is None:
        raise unsupported("tool_choice", choice, f"calls of the format {parser} have no fixed beginning; use auto")
    before, behind = opening
    return f"{before}{names[0]}{behind}" if len(names) == 1 else str(before)


def _message(index: int, raw: Raw) -> Message:
    """Converts a message to the form that most templates expect: content as text, calls' arguments as objects."""
    where = f"messages[{index}]"
    role, content, calls = raw.get("role"), raw.get("content"), raw.get("tool_calls")
    if not isinstance(role, str):
        raise refused(f"{where}.role", f"{where} has no role")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str) and not (content is None and raw.get("content") is None and calls):
        raise refused(f"{where}.content", f"{where}.content is {raw.get('content')!r:.80}; this server reads text")
    if not isinstance(calls, list | None):
        raise refused(f"{where}.tool_calls", f"{where}.tool_calls is {calls!r:.80}; expected a list")
    fields = {name: each for name, each in raw.items() if each is not None}
    if calls:
        fields["tool_calls"] = [_with_object(where, each) for each in calls]
    role = "system" if role == "developer" else role
    message = Message.from_dict({**fields, "role": role, "content": content or ""})
    check_message(message)
    return message


def _with_object(where: str, call: Raw) -> Raw:
    """Converts the arguments of a tool call from JSON text to an object."""
    try:
        function, arguments = call["function"], call["function"].get("arguments") or {}
        parsed = json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        return {**call, "function": {**function, "arguments": parsed}}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise refused(f"{where}.tool_calls", f"{where}.tool_calls cannot be read: {error!r}") from error
