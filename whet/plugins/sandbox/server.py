# SPDX-License-Identifier: Apache-2.0
"""`whet serve-sandbox`: a local sandbox behind HTTP, with SandboxFusion's interface (bytedance/SandboxFusion)."""

from __future__ import annotations

import asyncio
import base64
import logging
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import uvicorn
from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from whet.errors import ConfigError, SandboxError
from whet.guard import LOCAL, RefusedError, check_client, read_body, with_deadline
from whet.plugins.sandbox.http import SERVED, TOLD
from whet.programs.protocol import COMPILING, Language, Limits, Program, Ran, Sandbox

logger = logging.getLogger(__name__)
NAMES = {theirs: ours for ours, theirs in SERVED.items()} | {name: name for name in ("c", "javascript")}
MAX_BODY_BYTES = 64 * 2**20
BODY_SECONDS = 60.0  # for a client to send a body
MAX_WAITING = 1024  # programs beyond those that run; more get status 429


class RunRequest(BaseModel):
    """The body of a /run_code request."""

    code: str
    language: str
    stdin: str | None = ""
    compile_timeout: float = Field(10.0, gt=0, le=600)
    run_timeout: float = Field(10.0, gt=0, le=3600)
    memory_limit_MB: int = -1  # noqa: N815 - the interface has this name
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []
    whet_language: Language | None = None  # replaces the sandbox's language of this name


class SandboxApp:
    """The server's application; `asgi` runs it. It runs up to `concurrency` programs at a time. Without an API key it
    answers only requests to `host`, localhost, this machine's name or an IP address."""

    def __init__(self, sandbox: Sandbox, concurrency: int, host: str = "127.0.0.1", api_key: str | None = None) -> None:
        self._host, self._api_key = host, api_key
        self._sandbox, self._threads = sandbox, ThreadPoolExecutor(concurrency, "programs")
        self._unfinished, self._most = 0, concurrency + MAX_WAITING
        routes = [Route("/run_code", self._run, methods=["POST"]), Route("/v1/ping", self._ping)]
        routes += [Route("/v1/languages", self._languages)]
        self.asgi = Starlette(routes=routes, exception_handlers={RefusedError: _refused})

    async def _ping(self, _: Request) -> Response:
        return PlainTextResponse("pong")

    async def _languages(self, request: Request) -> Response:
        check_client(request.headers, self._host, self._api_key)
        return JSONResponse({"languages": [*self._sandbox.languages]})

    async def _run(self, request: Request) -> Response:
        check_client(request.headers, self._host, self._api_key)
        body = await read_body(request.headers, request.stream(), MAX_BODY_BYTES, BODY_SECONDS)
        try:
            asked = RunRequest.model_validate_json(body)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            return JSONResponse({"detail": found}, 422)
        if self._unfinished >= self._most:
            return JSONResponse({"detail": "too many programs wait; try again later"}, 429, {"Retry-After": "1"})
        self._unfinished += 1
        try:
            loop = asyncio.get_running_loop()
            return JSONResponse(await loop.run_in_executor(self._threads, partial(self._answer, asked)))
        finally:
            self._unfinished -= 1

    def _answer(self, asked: RunRequest) -> dict[str, object]:
        name = NAMES.get(asked.language, asked.language)
        language = asked.whet_language or self._sandbox.languages.get(name)
        if language is None:
            return _failed(f"unknown language {asked.language}; this sandbox has {', '.join(self._sandbox.languages)}")
        limits = Limits(seconds=asked.run_timeout, cpu_seconds=asked.run_timeout)
        if asked.memory_limit_MB > 0:
            limits = replace(limits, memory_bytes=asked.memory_limit_MB * 2**20)
        compiling = replace(COMPILING, seconds=asked.compile_timeout, cpu_seconds=asked.compile_timeout)
        try:
            files = {path: base64.b64decode(content or "", validate=True) for path, content in asked.files.items()}
            program = Program(name, asked.code, limits, compiling, files, asked.fetch_files, asked.whet_language)
            [ran] = self._sandbox.run(program, [(asked.stdin or "").encode(errors="replace")])
        except (SandboxError, ValueError) as error:
            logger.warning("a program could not be run: %s", error)
            return _failed(f"{error}")
        return _told(ran, is_compiled=isinstance(language, Language) and bool(language.compile))


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return JSONResponse({"detail": str(error)}, error.status)


@contextmanager
def bound_to(host: str, port: int) -> Iterator[socket.socket]:
    """Yields a socket that is bound to the address.  Raises: ConfigError."""
    try:
        # Without the protocol asyncio would leave Nagle's algorithm on, which delays replies by 40 ms.
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(1)
    except OSError as error:
        found, change = str(error.strerror), "name another with --host or --port"
        raise ConfigError(f"--host {host} --port {port}", found, "a free address of this machine", change) from error
    with bound:
        yield bound


def serve(sandbox: Sandbox, bound: socket.socket, host: str, concurrency: int, api_key: str | None) -> None:
    """Serves until Ctrl-C on a `bound` socket; `host` is its address as the user wrote it."""
    port = bound.getsockname()[1]
    if host not in LOCAL and not api_key:
        logger.warning("anyone who reaches %s:%d may run programs on this machine; set --api-key KEY", host, port)
    app, http = SandboxApp(sandbox, concurrency, host, api_key), with_deadline(AutoHTTPProtocol)
    config = uvicorn.Config(app.asgi, http=http, log_level="warning", access_log=False)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[bound])


def _told(ran: Ran, *, is_compiled: bool) -> dict[str, object]:
    """Converts a program's result to SandboxFusion's form. `message` tells how the program ended (`Ran.end`)."""
    late = ran.end == "timeout"
    result = {
        "status": "TimeLimitExceeded" if late else "Finished",
        "execution_time": ran.seconds,
        "return_code": None if late else ran.code,
        "stdout": ran.stdout.decode(errors="replace"),
        "stderr": ran.stderr.decode(errors="replace"),
    }
    well = {"status": "Finished", "execution_time": 0.0, "return_code": 0, "stdout": "", "stderr": ""}
    return _failed(f"{TOLD}{ran.end}") | {
        "status": "Success" if ran.end == "ok" else "Failed",
        "compile_result": result if ran.end == "compile" else well if is_compiled else None,
        "run_result": None if ran.end == "compile" else result,
        "files": {name: base64.b64encode(content).decode() for name, content in ran.files.items()},
    }


def _failed(message: str) -> dict[str, object]:
    results: dict[str, object] = {"compile_result": None, "run_result": None, "executor_pod_name": None, "files": {}}
    return {"status": "SandboxError", "message": message, **results}
