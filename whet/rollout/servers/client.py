# SPDX-License-Identifier: Apache-2.0
"""JSON over HTTP/1.1 to one server of this machine: a thread with an event loop, and connections that are reused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from whet.errors import EngineError

T = TypeVar("T")
HOST = "127.0.0.1"
STOP_SECONDS = 5.0  # for the thread to end
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpError(EngineError):
    """An answer other than 200; the message has its body."""


class Client:
    """Calls of a server, from any thread. Every call has a deadline; at the deadline its connection is closed, which
    tells the server that nobody waits for the answer."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._idle: list[Connection] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="whet-rollout-http", daemon=True)
        self._thread.start()

    def call(self, method: str, path: str, body: Any = None, *, seconds: float) -> Any:
        """The answer to one call.  Raises: HttpError, OSError, TimeoutError."""
        return self.start(self.answer(method, path, body, seconds=seconds)).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs `work` in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def answer(self, method: str, path: str, body: Any = None, *, seconds: float | None) -> Any:
        """The answer to one call, inside the thread; None waits as long as the caller lets it."""
        async with asyncio.timeout(seconds):
            return await self._exchange(method, path, b"" if body is None else json.dumps(body).encode())

    def close(self) -> None:
        """Ends all calls and the thread."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._cancel_all)
        self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def _cancel_all(self) -> None:
        for _, writer in self._idle:
            writer.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    async def events(self, path: str, body: Any) -> AsyncIterator[Any]:
        """The objects that the server sends as events, as they come.  Raises: HttpError, OSError, EOFError."""
        (reader, writer), status, headers = await self._begin("POST", path, json.dumps(body).encode())
        try:
            if status != 200:
                answer = b"".join([part async for part in _parts(reader, headers)])
                raise HttpError(_refused("POST", path, status, answer))
            rest = b""
            async for part in _parts(reader, headers):
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        yield json.loads(line[6:])
        finally:
            writer.transport.abort()

    async def _exchange(self, method: str, path: str, body: bytes) -> Any:
        (reader, writer), status, headers = await self._begin(method, path, body)
        try:
            answer = b"".join([part async for part in _parts(reader, headers)])
        except BaseException:
            writer.transport.abort()
            raise
        self._idle.append((reader, writer))
        if status != 200:
            raise HttpError(_refused(method, path, status, answer))
        is_json = "json" in headers.get("content-type", "")
        return json.loads(answer) if is_json else answer.decode(errors="replace")

    async def _begin(self, method: str, path: str, body: bytes) -> tuple[Connection, int, dict[str, str]]:
        """Sends a call.  Returns its connection, and the status and headers of the answer."""
        while True:
            is_used = bool(self._idle)
            reader, writer = self._idle.pop() if is_used else await asyncio.open_connection(HOST, self.port)
            try:
                head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}:{self.port}\r\nContent-Type: application/json\r\n"
                writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                await writer.drain()
                line = await reader.readline()
                if not line and is_used:
                    continue  # the server closed the connection while nobody used it
                return (reader, writer), _status(line), await _headers(reader)
            except ConnectionError:
                if is_used:
                    continue
                raise
            except BaseException:
                writer.transport.abort()
                raise


def _status(line: bytes) -> int:
    if not line.startswith(b"HTTP/1."):
        raise ConnectionResetError("the server closed the connection")
    return int(line.split()[1])


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return headers


async def _parts(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """The body of an answer, as it comes."""
    if headers.get("transfer-encoding", "").lower() != "chunked":
        yield await reader.readexactly(int(headers.get("content-length", 0)))
        return
    while size := int((await reader.readline()).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
    await reader.readline()


def _refused(method: str, path: str, status: int, answer: bytes) -> str:
    return f"{method} {path} was answered with {status}: {answer.decode(errors='replace')[:600]}"
