# SPDX-License-Identifier: Apache-2.0
"""The models that play: an OpenAI-compatible server, Ollama, or a rule that reads the pixels of the own pages."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from whet.errors import ConfigError
from whet_environments.devices.errors import BackendDeadlineError, BackendError

BACKENDS = ("openai", "ollama", "scripted")
URLS = {"openai": "http://127.0.0.1:8000", "ollama": "http://127.0.0.1:11434"}
CALL_SECONDS = 60.0
MAX_REPLY_BYTES = 4 * 1024 * 1024
MAX_TOKENS, TEMPERATURE = 512, 0.7

Kind = Literal["decide", "changed", "score", "state"]


@dataclass(frozen=True)
class Question:
    """A question to the model: a text and, unless the state is in the text, a screenshot."""

    kind: Kind
    text: str
    png: bytes | None = None
    is_chat: bool = True  # False: the text goes to the model as it is, without a chat template
    max_tokens: int = MAX_TOKENS


class Backend(Protocol):
    """A model that answers questions, each within a deadline."""

    name: str
    model: str

    def ask(self, question: Question) -> str:
        """Returns the answer.  Raises: BackendError; BackendDeadlineError if it takes too long."""
        ...


@dataclass
class ScriptedBackend:
    """A rule in place of a model: `answer` gets the question."""

    answer: Callable[[Question], str]
    name: str = "scripted"
    model: str = "rule"

    def ask(self, question: Question) -> str:
        """Returns the answer of the rule."""
        return self.answer(question)


@dataclass
class OpenAIBackend:
    """A server with `/v1/chat/completions`, such as `whet serve` and vLLM; plain text goes to `/v1/completions`."""

    url: str
    model: str
    temperature: float = TEMPERATURE
    seconds: float = CALL_SECONDS
    api_key: str = field(default="", repr=False)
    name: str = "openai"

    def ask(self, question: Question) -> str:
        """Returns the answer of the model."""
        body: dict[str, Any] = {"model": self.model, "temperature": self.temperature, "max_tokens": question.max_tokens}
        base = self.url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        hint = refused_hint(question)
        if not question.is_chat:
            reply = post(f"{base}/v1/completions", {**body, "prompt": question.text}, headers, self.seconds, hint)
            return _text_at(reply, ("choices", 0, "text"), base)
        content: str | list[dict[str, Any]] = question.text
        if question.png is not None:
            image = f"data:image/png;base64,{base64.b64encode(question.png).decode()}"
            content = [{"type": "text", "text": question.text}, {"type": "image_url", "image_url": {"url": image}}]
        messages = [{"role": "user", "content": content}]
        reply = post(f"{base}/v1/chat/completions", {**body, "messages": messages}, headers, self.seconds, hint)
        return _text_at(reply, ("choices", 0, "message", "content"), base)


@dataclass
class OllamaBackend:
    """Ollama's `/api/generate`."""

    url: str
    model: str
    temperature: float = TEMPERATURE
    seconds: float = CALL_SECONDS
    name: str = "ollama"

    def ask(self, question: Question) -> str:
        """Returns the answer of the model."""
        options = {"temperature": self.temperature, "num_predict": question.max_tokens}
        body: dict[str, Any] = {"model": self.model, "prompt": question.text, "stream": False, "options": options}
        if question.png is not None:
            body["images"] = [base64.b64encode(question.png).decode()]
        if not question.is_chat:
            body["raw"] = True
        url = f"{self.url.rstrip('/')}/api/generate"
        return _text_at(post(url, body, {}, self.seconds, refused_hint(question)), ("response",), self.url)


def refused_hint(question: Question) -> str:
    """Advice on further checks where a server refuses a question."""
    if question.png is not None:
        return ", and that the server takes images, or play with --observe words"
    if question.is_chat:
        return ", and that its vocabulary has all characters; a model of compact states plays with --observe compact"
    return ""


def post(url: str, body: Mapping[str, Any], headers: Mapping[str, str], seconds: float, hint: str = "") -> Any:
    """Posts JSON and returns the JSON of the reply; `seconds` is the deadline of the whole call, `hint` is added to the
    message where the server refuses.

    Raises: BackendError if the server cannot be reached, refuses, or answers with something else."""
    import httpx

    end, read = time.monotonic() + seconds, bytearray()
    late = BackendDeadlineError(
        url, f"no answer within {seconds:g} s", change="raise --call-seconds, or use a faster model"
    )
    try:
        is_here = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
        with (
            httpx.Client(timeout=seconds, trust_env=not is_here, verify=url.startswith("https:")) as client,
            client.stream("POST", url, json=body, headers=headers) as reply,
        ):
            for chunk in reply.iter_bytes():
                read += chunk
                if time.monotonic() > end:
                    raise late
                if len(read) > MAX_REPLY_BYTES:
                    raise BackendError(url, f"more than {MAX_REPLY_BYTES} bytes", "the reply of a model")
    except httpx.TimeoutException:
        raise late from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise BackendError(
            url,
            f"no answer: {error or type(error).__name__}",
            "the address of a model server",
            "start one (whet serve MODEL, ollama serve), or change --url",
        ) from error
    text = read.decode(errors="replace")
    if reply.status_code != 200:
        raise BackendError(url, f"status {reply.status_code}: {text[:300].strip()!r}", change=f"check --model{hint}")
    try:
        return json.loads(text)
    except ValueError:
        raise BackendError(url, f"{text[:200]!r}", "JSON of a model server", "change --url") from None


def _text_at(reply: Any, path: tuple[str | int, ...], url: str) -> str:
    found = reply
    try:
        for key in path:
            found = found[key]
    except (KeyError, IndexError, TypeError):
        found = None
    if not isinstance(found, str):
        shown = json.dumps(reply)[:200]
        where = ".".join(map(str, path))
        raise BackendError(url, shown, f"a text at {where}", "check --backend and --url")
    return found


def check_backend(name: str) -> None:
    """Checks the name of a back end.  Raises: ConfigError."""
    if name not in BACKENDS:
        near = get_close_matches(name, BACKENDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose one of them"
        raise ConfigError("--backend", name, f"one of {', '.join(BACKENDS)}", hint)


def make_backend(
    name: str,
    rule: Callable[[Question], str],
    *,
    url: str | None = None,
    model: str | None = None,
    temperature: float = TEMPERATURE,
    seconds: float = CALL_SECONDS,
    api_key: str = "",
) -> Backend:
    """Returns the back end of a name; `rule` gives the answers of the scripted one.  Raises: ConfigError."""
    check_backend(name)
    if name == "scripted":
        return ScriptedBackend(rule)
    if not model:
        raise ConfigError(
            "--model", None, "the name under which the server knows the model", f"set it for --backend {name}"
        )
    if name == "ollama":
        return OllamaBackend(url or URLS[name], model, temperature, seconds)
    return OpenAIBackend(url or URLS[name], model, temperature, seconds, api_key)
