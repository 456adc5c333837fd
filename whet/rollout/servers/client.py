# SPDX-License-Identifier: Apache-2.0
"""JSON over HTTP to one server of this machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from whet.errors import EngineError
from whet.http import CallError, Http, read
from whet.processes.background import in_loop

T = TypeVar("T")
HOST = "127.0.0.1"
STOP_SECONDS = 5.0  # for calls to end
MOST_BYTES = 2**30  # of an answer, or of one event


class HttpError(EngineError):
    """An answer other than 200, or one that is too long; `found` has the status and the start of its body."""


class Client:
    """Calls of a server, from any thread. Every call has a deadline; at the deadline its connection is closed, which
    tells the server that nobody waits for the answer."""

    def __init__(self, port: int) -> None:
        self.port, self._http = port, Http(is_local=True)
        self._calls = set[Future[Any]]()

    def call(self, method: str, path: str, body: Any = None, *, seconds: float) -> Any:
        """The answer to one call.  Raises: HttpError, ConnectionError, TimeoutError."""
        return self.start(self.answer(method, path, body, seconds=seconds)).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs `work` in the thread of requests."""
        self._calls.add(call := in_loop(work))
        call.add_done_callback(self._calls.discard)
        return call

    async def answer(self, method: str, path: str, body: Any = None, *, seconds: float | None) -> Any:
        """The answer to one call, inside the thread; None waits as long as the caller lets it."""
        async with asyncio.timeout(seconds), self._sent(method, path, body) as reply:
            content = await read(reply, MOST_BYTES)
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
                if len(rest) > MOST_BYTES:
                    raise CallError(f"it sent an event of more than {MOST_BYTES:,} bytes", status=200)

    def close(self) -> None:
        """Ends all calls and connections."""
        for call in (calls := [*self._calls]):
            call.cancel()
        wait([*calls, in_loop(self._http.close())], STOP_SECONDS)

    @asynccontextmanager
    async def _sent(self, method: str, path: str, body: Any) -> AsyncIterator[Any]:
        """An answer with status 200, whose body may still come.  Raises: HttpError, ConnectionError."""
        try:
            async with self._http.stream(method, f"http://{HOST}:{self.port}{path}", body) as reply:
                yield reply
        except CallError as error:
            if error.status:
                raise HttpError(f"{method} {path}", str(error), "an answer with status 200") from error
            raise ConnectionError(str(error)) from error
