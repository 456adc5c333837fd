# SPDX-License-Identifier: Apache-2.0
"""JSON over HTTP to one server of this machine: a thread with an event loop, and connections that are reused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import httpx

from whet.errors import EngineError

T = TypeVar("T")
HOST = "127.0.0.1"
STOP_SECONDS = 5.0  # for the thread to end
IDLE_SECONDS = 2.0  # after which an unused connection is closed here, before the server does it beside a new request


class HttpError(EngineError):
    """An answer other than 200; the message has its body."""


class Client:
    """Calls of a server, from any thread. Every call has a deadline; at the deadline its connection is closed, which
    tells the server that nobody waits for the answer."""

    def __init__(self, port: int) -> None:
        self.port = port
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_SECONDS)
        self._http = httpx.AsyncClient(base_url=f"http://{HOST}:{port}", limits=limits, timeout=None, trust_env=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="whet-rollout-http", daemon=True)
        self._thread.start()

    def call(self, method: str, path: str, body: Any = None, *, seconds: float) -> Any:
        """The answer to one call.  Raises: HttpError, ConnectionError, TimeoutError."""
        return self.start(self.answer(method, path, body, seconds=seconds)).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs `work` in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def answer(self, method: str, path: str, body: Any = None, *, seconds: float | None) -> Any:
        """The answer to one call, inside the thread; None waits as long as the caller lets it."""
        async with asyncio.timeout(seconds), self._sent(method, path, body) as reply:
            content = await reply.aread()
        is_json = "json" in reply.headers.get("content-type", "")
        return json.loads(content) if is_json else content.decode(errors="replace")

    async def events(self, path: str, body: Any) -> AsyncIterator[Any]:
        """The objects that the server sends as events, as they come.  Raises: HttpError, ConnectionError."""
        async with self._sent("POST", path, body) as reply:
            rest = b""
            async for part in reply.aiter_bytes():
                *lines, rest = (rest + part).split(b"\n")  # not at other line ends, which a text may have
                for line in lines:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        yield json.loads(line[6:])

    def close(self) -> None:
        """Ends all calls and the thread."""
        if self._loop.is_closed():
            return
        self.start(self._end())
        self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        calls = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, self._http.aclose(), return_exceptions=True)
        self._loop.call_soon(self._loop.stop)

    @asynccontextmanager
    async def _sent(self, method: str, path: str, body: Any) -> AsyncIterator[httpx.Response]:
        """An answer with status 200, whose body may still come.  Raises: HttpError, ConnectionError."""
        try:
            async with self._http.stream(method, path, json=body) as reply:
                if reply.status_code != 200:
                    shown = (await reply.aread()).decode(errors="replace")[:600]
                    raise HttpError(f"{method} {path}", f"was answered with {reply.status_code}: {shown}", "200")
                yield reply
        except httpx.HTTPError as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
