# SPDX-License-Identifier: Apache-2.0
"""MCP servers: a process (stdio), an address (streamable HTTP) or a Python object. Each episode has its session."""

from __future__ import annotations

import asyncio
import base64
import importlib
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from whet.data.media import image, images
from whet.errors import ConfigError, DataError, ToolError, describe, pip_install
from whet.plugins.agents.tools.sources import BadCallError, Part, Session, ToolSchema, ToolSource
from whet.processes.background import in_loop
from whet.registry import load_target
from whet.types import Prompt

FORMS = "{command: [...], env: {...}}, {url: http://..., headers: {...}} or {python: path/file.py:server}"
IN_A_TERMINAL = "run its command in a terminal"
_SECRET = re.compile(r"auth|cookie|key|secret|token", re.IGNORECASE)  # in names of headers
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
T = TypeVar("T")


class McpSource(ToolSource):
    """The tools of an MCP server. `known` has their schemas if they were read before."""

    def __init__(
        self, server: Mapping[str, Any], where: str, seconds: float, known: Sequence[ToolSchema] | None = None
    ) -> None:
        self._where, self._seconds, self._shown = where, seconds, str(next(iter(server.values()), ""))
        try:
            importlib.import_module("mcp")
        except ImportError as error:
            raise ConfigError(where, "the package mcp is missing", "", f"run {pip_install('mcp')}") from error
        self._open = _opener(server, where)
        self.schemas = list(known) if known is not None else in_loop(self._ask()).result()

    def session(self, prompt: Prompt) -> Session:
        return McpSession(self._open, f"{self._where}: MCP server {self._shown}")

    async def _ask(self) -> list[ToolSchema]:
        session = McpSession(self._open, f"{self._where}: MCP server {self._shown}")
        try:
            async with asyncio.timeout(self._seconds):
                await session.start()
                return await session.schemas()
        except TimeoutError as error:
            change = f"{IN_A_TERMINAL} to see why, or raise environment.tool_limits.start_seconds"
            found = f"not started in {self._seconds:g} s"
            raise ToolError(session.name, found, "its list of tools", change) from error
        finally:
            await session.close()


class McpSession(Session):
    """A connection to an MCP server. One asyncio task opens and closes it, as mcp requires; any task may make calls."""

    def __init__(self, opener: Callable[[], Any], name: str) -> None:
        self._opener, self.name = opener, name
        self._client: Any = None
        self._ready: asyncio.Future[None]
        self._over: asyncio.Event
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._ready, self._over = asyncio.get_running_loop().create_future(), asyncio.Event()
        self._task = asyncio.create_task(self._hold())
        await self._ready

    async def schemas(self) -> list[ToolSchema]:
        """Fetches the schemas of all tools of the server."""
        found, cursor = list[ToolSchema](), None
        while True:
            page = await self._request(self._client.list_tools(cursor=cursor))
            found += [ToolSchema(tool.name, tool.description or "", dict(tool.input_schema)) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Sequence[Part]:
        result = await self._request(self._client.call_tool(name, dict(arguments)))
        if result.is_error:
            raise BadCallError("\n".join(str(_part(each)) for each in result.content if each.type != "image"))
        found = groupby(map(_part, result.content), key=lambda part: isinstance(part, str))
        return [part for is_text, some in found for part in (["\n".join(map(str, some))] if is_text else some)] or [""]

    async def close(self) -> None:
        if self._task is not None:
            self._over.set()
            if not self._ready.done():
                self._task.cancel()
            await asyncio.wait([self._task], timeout=3.0)
            self._task.cancel()

    async def _hold(self) -> None:
        try:
            async with self._opener() as client:
                self._client = client
                if not self._ready.done():
                    self._ready.set_result(None)
                await self._over.wait()
        except BaseException as error:  # a group of errors, of the library or of the server
            if self._ready.done():
                return
            change = f"{IN_A_TERMINAL}, or correct command or url"
            found = f"does not start ({describe(_first(error))})"
            self._ready.set_exception(ToolError(self.name, found, "a running server", change))

    async def _request(self, request: Coroutine[Any, Any, T]) -> T:
        """Waits for the server's reply.  Raises: ToolError if the connection is lost; BadCallError."""
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED

        asked = asyncio.ensure_future(request)
        assert self._task is not None
        await asyncio.wait([asked, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            raise ToolError(self.name, "ended during a call", change="read its log")
        try:
            return asked.result()
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise ToolError(self.name, f"ended during a call ({error.message})", change="read its log") from error
            raise BadCallError(error.message) from error
        except Exception as error:  # a transport that is closed raises errors of other libraries
            raise ToolError(self.name, f"lost ({describe(_first(error))})", change="read its log") from error


def _opener(server: Mapping[str, Any], where: str) -> Callable[[], Any]:
    """Returns a function that creates the client of a server.  Raises: ConfigError for an unknown form."""
    import mcp
    from mcp.client.stdio import StdioServerParameters, stdio_client

    match dict(server):
        case {"command": [command, *rest], **more} if not {*more} - {"env", "cwd"}:
            environment = {**os.environ, **{name: str(value) for name, value in (more.get("env") or {}).items()}}
            words = [str(each) for each in rest]
            given = StdioServerParameters(command=str(command), args=words, env=environment, cwd=more.get("cwd"))
            return lambda: mcp.Client(stdio_client(given))
        case {"url": str(url), **more} if not more:
            return lambda: mcp.Client(url)
        case {"url": str(url), "headers": Mapping() as headers, **more} if not more:
            own = _headers(headers, f"{where}.mcp.headers")
            return lambda: mcp.Client(_over_http(url, own))
        case {"python": str(path), **more} if not more:
            try:
                found = load_target(path, is_called=False)
            except Exception as error:  # importing the file runs code of the user
                found = f"{path} ({describe(error)})"
                raise ConfigError(f"{where}.mcp.python", found, "code that loads", "correct it") from error
            return lambda: mcp.Client(found)
    shown = {key: sorted(value) if isinstance(value, Mapping) else value for key, value in server.items()}  # no secrets
    raise ConfigError(f"{where}.mcp", shown, FORMS, f"correct it (seen from {Path.cwd()})")


def _headers(given: Mapping[str, Any], where: str) -> dict[str, str]:
    """Returns HTTP headers in which environment variables replace `$NAME` and `${NAME}`.

    Raises: ConfigError for an unset variable, and for a secret in the config itself, since runs save their config."""
    found = {}
    for name, value in given.items():
        text = str(value)
        if _SECRET.search(name) and not re.fullmatch(rf"(?:[A-Za-z]+ )?{_VARIABLE.pattern}", text):
            expected = "the environment variable that has it, such as 'Bearer $MCP_TOKEN'"
            change = "set such a variable, and name it here"
            raise ConfigError(f"{where}.{name}", "a secret, which the run would save", expected, change)
        if unset := [each for each in map("".join, _VARIABLE.findall(text)) if each not in os.environ]:
            raise ConfigError(f"{where}.{name}: environment variable {unset[0]}", None, "the secret", "set it")
        found[name] = _VARIABLE.sub(lambda variable: os.environ[variable[1] or variable[2]], text)
    return found


@asynccontextmanager
async def _over_http(url: str, headers: dict[str, str]) -> AsyncIterator[Any]:
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    async with create_mcp_http_client(headers=headers) as own, streamable_http_client(url, http_client=own) as streams:
        yield streams


def _part(content: Any) -> Part:
    """Converts a block of a result to text, an image, or its type as text.  Raises: BadCallError for a broken image."""
    if content.type != "image":
        return str(content.text) if content.type == "text" else f"[{content.type}]"
    try:
        found = image(base64.b64decode(content.data))
        images(found)
    except (DataError, ValueError) as error:
        raise BadCallError(f"the server gave an image that cannot be read: {error}") from error
    return found


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
