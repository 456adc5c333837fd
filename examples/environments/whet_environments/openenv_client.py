# SPDX-License-Identifier: Apache-2.0
"""Environments behind OpenEnv servers, by OpenEnv's WebSocket protocol: a session for each episode.

    pip install './examples/environments[openenv]'
    whet env play openenv --option url=http://127.0.0.1:8000

Messages are {"type": "reset" | "step" | "close", "data": ...}; a reply has the type "observation", with observation,
reward and done, or "error" (openenv-core 0.3, `env_server/http_server.py`).
"""

from __future__ import annotations

import asyncio
import atexit
import json
import re
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import httpx

from whet.environments.protocol import Answer, Observation
from whet.errors import ConfigError
from whet.limits import REPLY_BYTES, read_json
from whet.options import NonNegative, Positive
from whet.registry import register_environment
from whet.types import Message, Prompt

OWN = "WhetObservation"  # the title of the observations of `openenv_server`, which have all that whet's have
INSTALL = "pip install './examples/environments[openenv]'"
MOST_READ = 20_000  # characters of an answer
MOST_SAID = 2000  # characters of why a server refused an action
MOST_TOLD = 240  # characters of the output of a server that failed; a message of a failure has room for few
FENCED = re.compile(r"^```\w*\n(.*?)\n?```$", re.DOTALL)
POLL_SECONDS = 0.1
FULL_SECONDS = 0.5  # between two requests to a server without room
Schema = Mapping[str, Any]


class RefusedError(ValueError):
    """An answer that is no action of the environment."""


class FullError(RuntimeError):
    """A server without room for another session."""


@register_environment("openenv", shared=True)
class OpenEnv:
    """An environment behind an OpenEnv server, at `url`, or started by `command`, in which `{port}` is a free port.

    `action` is a template of the action: `{"message": "{text}"}`, where `{text}` is the answer; its values get the
    types of the action's JSON schema. Without it the answer is a JSON object with fields of the schema, such as
    `tool_name` and `arguments` of a tool call, or else the text of its one required field. An answer that gives no
    action costs `format_penalty` and is told why. An observation is read from `show`, a field or a text such as
    `{board}, {lives} lives`; without it from its only field with text, or else as JSON; numbers in it become fields.
    `reset` are arguments of the reset beside the seed; a row of the data set may have more of them in a field `reset`.
    Every message has a deadline; a server that is lost fails the episode. One without room for another session is
    asked again for `start_seconds`.
    """

    def __init__(
        self,
        *,
        url: str | None = None,
        command: str | None = None,
        action: Mapping[str, Any] | None = None,
        show: str | None = None,
        reset: Mapping[str, Any] | None = None,
        format_penalty: NonNegative = 0.0,
        connect_seconds: Positive = 10.0,
        message_seconds: Positive = 30.0,
        start_seconds: Positive = 90.0,
    ) -> None:
        if (url is None) == (command is None):
            found = "neither url nor command" if url is None else "both url and command"
            raise ConfigError("environment.options", found, "one of url and command", "set exactly one")
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError("environment.options.url", url, "http://HOST:PORT")
        self.url, self.command, self.template, self.show, self.given = url, command, action, show, dict(reset or {})
        self.format_penalty, self.connect_seconds, self.message_seconds = (
            format_penalty,
            connect_seconds,
            message_seconds,
        )
        self.start_seconds, self.socket, self.is_over, self.server = start_seconds, None, True, ""

    async def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Opens a session and begins.  Raises: ConnectionError, TimeoutError, RuntimeError for a server's error."""
        url = self.server = self.url or await server_url(self.command or "", self.start_seconds)
        self.schemas = await read_schemas(url, self.connect_seconds)
        given = {"seed": seed % 2**31, **self.given, **(prompt.extra_info.get("reset") or {})}
        if self._is_whet:
            messages = [asdict(message) for message in prompt.messages]
            own = {"messages": messages, "ground_truth": prompt.ground_truth, "extra_info": dict(prompt.extra_info)}
            given = {**given, "seed": seed, **own}
        self.is_over, until = False, time.monotonic() + self.start_seconds
        while True:
            self.socket = await connect(url, self.connect_seconds)
            try:
                return self._read(await self._asked("reset", given))
            except FullError as full:
                await self.close()
                if time.monotonic() > until:
                    raise FullError(
                        f"{full}; asked for {self.start_seconds:g} s: lower environment.max_episodes"
                    ) from None
                await asyncio.sleep(FULL_SECONDS)

    async def step(self, answer: Answer) -> Observation:
        """Sends an action.  Raises: RuntimeError after the end or for an error of the server, ConnectionError,
        TimeoutError."""
        if self.is_over or self.socket is None:
            raise RuntimeError("step was called after the end of the episode, or before reset; call reset first")
        try:
            return self._read(await self._asked("step", self._action(answer)))
        except RefusedError as refused:
            messages = (Message("user", f"That is no action: {refused}"),)
            return Observation(False, messages, 0.0 - self.format_penalty, {"invalid": 1.0})

    async def close(self) -> None:
        """Ends the session."""
        connection, self.socket = self.socket, None
        if connection is not None:
            try:
                async with asyncio.timeout(2.0):
                    await connection.send(json.dumps({"type": "close"}))
                    await connection.close()
            except Exception:  # the connection is lost, which is as good
                connection.transport.abort()

    def _action(self, answer: Answer) -> Mapping[str, Any]:
        if not self._is_whet:
            return read_action(answer.text[-MOST_READ:], self.schemas["action"], self.template)
        calls, tokens = [dict(call) for call in answer.tool_calls], list(answer.token_ids)
        return {"text": answer.text, "tool_calls": calls, "token_ids": tokens, "finish_reason": answer.finish_reason}

    @property
    def _is_whet(self) -> bool:
        return self.schemas["observation"].get("title") == OWN

    async def _asked(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """The data of the reply to a message."""
        from websockets.exceptions import ConnectionClosed

        assert self.socket is not None
        try:
            async with asyncio.timeout(self.message_seconds):
                with suppress(ConnectionClosed):  # the server may have said why before it closed
                    await self.socket.send(json.dumps({"type": kind, "data": data}))
                reply = await self.socket.recv()
        except TimeoutError:
            raise TimeoutError(
                f"the OpenEnv server at {self.server} sent no reply to {kind} within {self.message_seconds:g} s"
            ) from None
        except ConnectionClosed as error:
            raise ConnectionError(
                f"the OpenEnv server at {self.server} closed the connection during {kind}: {error}"
            ) from None
        return read_reply(reply, kind, self.server)

    def _read(self, data: Mapping[str, Any]) -> Observation:
        seen, reward, done = data["observation"], float(data.get("reward") or 0.0), bool(data.get("done"))
        self.is_over = done
        if self._is_whet:
            try:
                messages = tuple(Message(**each) for each in seen["messages"])
                names = ("context", "fields", "is_trained", "max_tokens", "player", "rewards", "state_key", "truncated")
                more = {name: seen[name] for name in names}
                return Observation(done and not more["truncated"], messages, reward, **more)
            except (LookupError, TypeError) as error:
                raise RuntimeError(
                    f"the OpenEnv server at {self.server} sent no observation of whet: {error!r}; start it by "
                    "`openenv_server`"
                ) from None
        text = shown(seen, self.show)
        numbers = {name: float(value) for name, value in seen.items() if isinstance(value, int | float)}
        return Observation(done, (Message("user", text),) if text else (), reward, numbers, state_key=text or None)


def read_reply(text: str | bytes, kind: str, url: str) -> Mapping[str, Any]:
    """The data of a reply: an observation and a reward.  Raises: RefusedError, FullError; RuntimeError for an error of
    the server, and for a reply over the limits of `whet.limits` or of another form."""
    try:
        reply = read_json(text)
        data = reply.get("data")
        is_error = reply.get("type") == "error"
        given = data.get("reward")
        if not (isinstance(data, Mapping) and isinstance(given, int | float | None)):
            raise ValueError("expected data with a number as reward")
        if not is_error and not isinstance(data.get("observation"), Mapping):
            raise ValueError("expected an observation")
    except (ValueError, AttributeError) as error:
        shown = text[:200] if isinstance(text, str) else text[:200].decode(errors="replace")
        raise RuntimeError(f"the OpenEnv server at {url} answered {kind} with {shown}: {error}") from None
    if is_error:
        code, errors = data.get("code"), data.get("errors")
        if kind == "step" and code == "VALIDATION_ERROR":
            raise RefusedError(_why([each for each in errors if isinstance(each, Mapping)] if _is_list(errors) else ()))
        why = f"the OpenEnv server at {url} answered {kind} with {code!s:.80}: {data.get('message')!s:.500}"
        raise (FullError if code == "CAPACITY_REACHED" else RuntimeError)(why)
    return data


def read_action(text: str, schema: Schema, template: Mapping[str, Any] | None) -> dict[str, Any]:
    """The action of an answer.  Raises: RefusedError, ConfigError for a template with unknown fields."""
    fields, required = schema.get("properties", {}), list(schema.get("required", ()))
    if template is not None:
        if unknown := [name for name in template if fields and name not in fields]:
            raise ConfigError(
                "environment.options.action",
                unknown[0],
                f"fields of the environment's action: {', '.join(fields)}",
                "correct it",
            )
        return {name: _filled(value, text, fields.get(name, {}), name) for name, value in template.items()}
    fenced = FENCED.match(text.strip())
    try:
        action = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        action = None
    is_action = isinstance(action, dict) and all(name in action for name in required)
    if len(required) == 1 and not (is_action and all(name in fields for name in action)):
        return {required[0]: converted(text, fields.get(required[0], {}), required[0])}
    if not isinstance(action, dict):
        raise RefusedError(f"expected a JSON object with {', '.join(required or fields)}")
    return action


def _filled(value: Any, text: str, schema: Schema, name: str) -> Any:
    return converted(value.replace("{text}", text), schema, name) if isinstance(value, str) else value


def converted(text: str, schema: Schema, name: str) -> Any:
    """The value of a field with a JSON schema: text as it is, other types read as JSON.  Raises: RefusedError."""
    kinds = {schema.get("type"), *(each.get("type") for each in schema.get("anyOf", ()))} - {None, "null"}
    if not kinds or "string" in kinds:
        allowed = schema.get("enum")
        found = text.strip() if allowed else text
        if allowed and found not in allowed:
            raise RefusedError(f"{name} is {found[:40]!r}; expected one of {', '.join(map(str, allowed))}")
        return found
    try:
        return json.loads(text.strip().lower() if kinds == {"boolean"} else text.strip())
    except (ValueError, RecursionError):
        wanted = " or ".join(sorted(map(str, kinds)))
        raise RefusedError(f"{name} is {text.strip()[:40]!r}; expected {wanted}") from None


def shown(seen: Mapping[str, Any], show: str | None) -> str:
    """The text of an observation.  Raises: ConfigError for a field in `show` that it does not have."""
    if show is not None:
        names = re.findall(r"\{(\w+)\}", show) or [show]
        if absent := [name for name in names if name not in seen]:
            raise ConfigError(
                "environment.options.show", absent[0], f"fields of the observation: {', '.join(seen)}", "correct it"
            )
        return _text(seen[show]) if names == [show] else re.sub(r"\{(\w+)\}", lambda found: _text(seen[found[1]]), show)
    texts = [value for value in seen.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else json.dumps(seen, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _why(errors: Sequence[Mapping[str, Any]]) -> str:
    """The errors of pydantic in one line."""
    places = [each.get("loc") for each in errors[:3]]
    words = [".".join(map(str, place)) if _is_list(place) else str(place) for place in places]
    found = [f"{word}: {each.get('msg')}" for word, each in zip(words, errors, strict=False)]
    return "; ".join(found)[:MOST_SAID] or "the server refused it"


def _is_list(value: object) -> bool:
    return isinstance(value, list)


async def connect(url: str, seconds: float) -> Any:
    """A WebSocket to a server.  Raises: ConfigError without the package, ConnectionError."""
    try:
        from websockets.asyncio.client import connect as open_socket
    except ImportError as error:
        raise ConfigError("package websockets", "not installed", change=f"run {INSTALL}") from error
    address = f"ws{url.rstrip('/').removeprefix('http')}/ws"
    try:
        return await open_socket(address, open_timeout=seconds, max_size=REPLY_BYTES, proxy=None)
    except Exception as error:  # refused, no such host, no WebSocket
        raise ConnectionError(f"no OpenEnv server answers at {url}: {error or type(error).__name__}") from None


_SCHEMAS: dict[str, Mapping[str, Schema]] = {}  # by address


async def read_schemas(url: str, seconds: float) -> Mapping[str, Schema]:
    """The JSON schemas of action and observation.  Raises: ConnectionError."""
    if url not in _SCHEMAS:
        try:
            async with httpx.AsyncClient(timeout=seconds, trust_env=False) as client:
                async with client.stream("GET", f"{url.rstrip('/')}/schema") as reply:
                    content = bytearray()
                    async for part in reply.raise_for_status().aiter_bytes():
                        content += part
                        if len(content) > REPLY_BYTES:
                            break
                found = read_json(bytes(content))
            _SCHEMAS[url] = {name: _schema(found[name]) for name in ("action", "observation")}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError, AttributeError) as error:
            what = f"{error or type(error).__name__}"
            raise ConnectionError(f"no OpenEnv server answers at {url}/schema: {what}") from None
    return _SCHEMAS[url]


def _schema(given: Any) -> Schema:
    """A JSON schema, if the parts that are read have the form of one.  Raises: TypeError."""
    fields, required = given.get("properties", {}), given.get("required", [])
    for each in fields.values():
        parts = [each, *each.get("anyOf", [])]
        if not all(isinstance(part.get("type", ""), str) for part in parts):
            raise TypeError(f"the type of a field is {str(each)[:80]}")
    if not all(isinstance(name, str) for name in required):
        raise TypeError(f"its required fields are {str(required)[:80]}")
    return dict(given)


class Server:
    """A server process that this process started, which ends with it."""

    def __init__(self, command: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        _SCHEMAS.pop(self.url, None)
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 -- it lives as long as the process
        words = [word.replace("{port}", str(self.port)) for word in shlex.split(command)]
        try:
            self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.output)
        except OSError as error:
            raise ConfigError(
                "environment.options.command", f"{command}: {error}", "a command that starts", "correct it"
            ) from error
        atexit.register(self.stop)

    async def until_ready(self, seconds: float) -> str:
        """The address, once the server answers.  Raises: ConnectionError with the end of its output."""
        until = time.monotonic() + seconds
        while True:
            try:
                await read_schemas(self.url, min(seconds, 5.0))
                return self.url
            except ConnectionError as error:
                ended = self.process.poll()
                if ended is not None or time.monotonic() > until:
                    self.stop()
                    self.output.seek(0)
                    said = last_lines(self.output.read()[-MOST_READ:].decode("utf-8", "replace"))
                    what = f"ended with exit code {ended}" if ended is not None else f"{error} within {seconds:g} s"
                    raise ConnectionError(
                        f"the server of environment.options.command {what}; it wrote: {said}"
                    ) from None
            await asyncio.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Ends the process."""
        atexit.unregister(self.stop)
        self.process.kill()
        self.process.wait()


def last_lines(text: str, most: int = MOST_TOLD) -> str:
    """The last lines of an output, `most` characters at most, without lines that underline: the reason is there."""
    kept = ""
    for line in reversed(text.splitlines()):
        found = line.strip()
        if not found.strip("^~ "):
            continue
        if kept and len(found) + len(kept) >= most:
            break
        kept = f"{found[:most]}\n{kept}".strip()
    return kept


_SERVERS: dict[str, tuple[Server, asyncio.Task[str]]] = {}  # by command, for all episodes of this process


async def server_url(command: str, seconds: float) -> str:
    """The address of the server that a command starts; a server that has ended is started again."""
    if command not in _SERVERS or _SERVERS[command][0].process.poll() is not None:
        server = Server(command)
        _SERVERS[command] = server, asyncio.ensure_future(server.until_ready(seconds))
    return await asyncio.shield(_SERVERS[command][1])
