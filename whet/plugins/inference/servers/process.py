# SPDX-License-Identifier: Apache-2.0
"""Runs the server of a rollout engine: its process and its log. Calls the server with JSON over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from whet import devices
from whet.errors import ConfigError, EngineError
from whet.http import CallError, Http, read
from whet.processes.background import in_loop

T = TypeVar("T")
HOST = "127.0.0.1"
STOP_SECONDS = 5.0  # for calls to end
MOST_BYTES = 2**30  # of an answer, or of one event
INSIDE = Path(__file__).parent / "inside"  # what every process of a server imports
PLACES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")  # torch's
TELLING = re.compile(r"\b\w*(Error|Exception)\b: |No module named|unrecognized arg|died unexpectedly|Value error,")
SHARED = re.compile(r"/dev/shm/psm_\w+")
SHOWN_LINES = 12
HEALTH_SECONDS = 5.0
EXAMINE_SECONDS = 20.0  # for a busy machine
TICK_SECONDS = 0.1
END_SECONDS = 10.0  # between asking the processes to end and killing them


class HttpError(EngineError):
    """A reply with a status other than 200, or too long. `found` has the status and the start of the body."""


class ServerClient:
    """Calls a server, from any thread. Every call has a deadline. At the deadline its connection is closed, so that the
    server knows that nobody waits for the reply."""

    def __init__(self, port: int) -> None:
        self.port, self._http = port, Http(is_local=True)
        self._calls = set[Future[Any]]()

    def call(self, method: str, path: str, body: Any = None, *, seconds: float) -> Any:
        """Makes one call and returns the reply.  Raises: HttpError, ConnectionError, TimeoutError."""
        return self.start(self.answer(method, path, body, seconds=seconds)).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs `work` in the client's thread, which makes the calls."""
        self._calls.add(call := in_loop(work))
        call.add_done_callback(self._calls.discard)
        return call

    async def answer(self, method: str, path: str, body: Any = None, *, seconds: float | None) -> Any:
        """Makes one call, for coroutines in the client's thread, and returns the reply. `seconds=None`: no deadline."""
        async with asyncio.timeout(seconds), self._sent(method, path, body) as reply:
            content = await read(reply, MOST_BYTES)
        is_json = "json" in reply.headers.get("content-type", "")
        return json.loads(content) if is_json else content.decode(errors="replace")

    async def events(self, path: str, body: Any) -> AsyncIterator[Any]:
        """Yields the objects of the server's event stream as they arrive.  Raises: HttpError, ConnectionError."""
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
        """Yields a reply with status 200; its body may still be arriving.  Raises: HttpError, ConnectionError."""
        try:
            async with self._http.stream(method, f"http://{HOST}:{self.port}{path}", body) as reply:
                yield reply
        except CallError as error:
            if error.status:
                raise HttpError(f"{method} {path}", str(error), "an answer with status 200") from error
            raise ConnectionError(str(error)) from error


class Server:
    """The process of a server. It ends with this object or with the process that made this object. Its log is kept only
    after a failure; every end without `close` is a failure, even with exit code 0."""

    def __init__(self, kind: str, command: Sequence[str], environment: Mapping[str, str], port: int) -> None:
        self._kind, self.error = kind, EngineError  # the error that a failure raises
        self.folder = Path(tempfile.mkdtemp(prefix=f"whet-{kind.lower()}-"))
        self.log, self.client = self.folder / "log", ServerClient(port)
        own = {**environment, "TMPDIR": str(self.folder)}  # sockets that a killed server leaves go with the folder
        # A process gets its parent-death signal when the thread that started it ends: the client's thread lives on.
        self.process = self.client.start(_start(command, own, self.log)).result()
        self._end = weakref.finalize(self, _end, self.process)

    def wait(self, seconds: float) -> None:
        """Waits until the server answers.  Raises: EngineError if it ends, or does not answer within `seconds`."""
        until = time.monotonic() + seconds
        while True:
            self.check()
            with suppress(OSError, HttpError):
                self.client.call("GET", "/health", seconds=HEALTH_SECONDS)
                return
            if time.monotonic() > until:
                change = "raise rollout.engine.options.start_seconds; "
                raise self.failure(f"did not answer within {seconds:g} s", change)
            time.sleep(TICK_SECONDS)

    def check(self) -> None:
        """Raises: EngineError if the process has ended."""
        if (code := self.process.poll()) is not None:
            raise self.failure(f"ended with code {code}")

    def examine(self, why: str) -> None:
        """Checks the server after a request failed because of `why`.  Raises: EngineError if the server is lost."""
        until = time.monotonic() + EXAMINE_SECONDS
        while time.monotonic() < until:  # a server that lost a worker refuses at once, and ends seconds later
            self.check()
            with suppress(OSError, HttpError):
                self.client.call("GET", "/health", seconds=HEALTH_SECONDS)
                return
            time.sleep(TICK_SECONDS)
        raise self.failure(f"does not answer GET /health after {why}")

    def failure(self, what: str, change: str = "") -> EngineError:
        """Returns the error of a failed server, with the relevant lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        telling = dict[str, str]()  # lines by text: several processes log the same one after their names
        for line in lines:
            found = TELLING.search(line)
            if found and "WARNING" not in line[: found.start()]:
                telling.setdefault(line[found.start() :].strip(), line.strip())
        shown = "\n".join([*telling.values()][:SHOWN_LINES] or lines[-SHOWN_LINES:])
        who = f"{self._kind} server (process {self.process.pid}, {HOST}:{self.client.port})"
        return self.error(who, what, "", f"{change}read its log {self.log}:\n{shown or 'it is empty'}")

    def close(self) -> None:
        """Ends the processes, and removes the log of a server that did not fail."""
        is_well = self.process.poll() is None
        self._end()
        self.client.close()
        if is_well:
            shutil.rmtree(self.folder, ignore_errors=True)


def variables(threads: int, device: torch.device, num_devices: int, inside: Path) -> dict[str, str]:
    """Returns the environment variables of a server. It uses `threads` threads, or `num_devices` accelerators from
    `device` on; its processes import only the folder `inside` of whet."""
    kept = {name: value for name, value in os.environ.items() if name not in PLACES}
    if device != devices.HOST:
        visible, first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","), device.index or 0
        own = range(first, first + num_devices)
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(visible[index] if visible != [""] else str(index) for index in own)
    compiled = str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}")
    kept.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled)
    return kept | {"PYTHONPATH": f"{INSIDE}{os.pathsep}{inside}", "OMP_NUM_THREADS": str(threads)}


def free_port(wanted: int | None) -> int:
    """Returns the port `wanted`, or any free port.  Raises: ConfigError if `wanted` is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted or 0))
        except OSError as error:
            expected, change = f"a free port ({error.strerror})", "leave it out for any, or name another"
            raise ConfigError("rollout.engine.options.port", wanted, expected, change) from error
        port: int = probe.getsockname()[1]
        return port


async def _start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd="/", start_new_session=True
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the server's session, first by SIGTERM, then by SIGKILL. Removes files that its processes left."""
    files = _shared_memory(process.pid)
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(END_SECONDS)
    for file in files:
        file.unlink(missing_ok=True)


def _shared_memory(session: int) -> set[Path]:
    """Returns the files in shared memory that Python created and that processes of a session use."""
    found = set[Path]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if os.getsid(int(process.name)) == session:
                found |= {Path(name) for name in SHARED.findall((process / "maps").read_text())}
    return found
