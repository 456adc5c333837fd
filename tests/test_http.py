# SPDX-License-Identifier: Apache-2.0
"""The same misbehaviour of a server, met by each part of whet that sends requests; and the waits between attempts."""

from __future__ import annotations

import asyncio
import email.utils
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from tests.by_hand import Answer, ByHand
from whet import http
from whet.data import media
from whet.data.media import MediaLimits, MediaReader
from whet.errors import DataError, RewardError, SandboxError
from whet.http import CallError, Http, fetch, insist, read, shown
from whet.limits import REPLY_BYTES
from whet.plugins.inference.servers import process as servers
from whet.plugins.sandbox import http as sandbox
from whet.plugins.scores.judge.client import Client as Judge, Settings
from whet.programs.protocol import Program

SECRET = "hunter2"
SECONDS = 0.6  # that a user gives a call
BUFFER = BytesIO()
Image.new("RGB", (2, 2)).save(BUFFER, "PNG")
CHAT = {"choices": [{"message": {"content": "fine"}}], "usage": {}}
RAN = {"languages": ["python"], "run_result": {"status": "Finished", "return_code": 0, "stdout": "fine"}}


def reply(content: bytes, status: str = "200 OK", *heads: str, length: int | None = None) -> bytes:
    """A reply as bytes."""
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", *heads]
    lines.append(f"Content-Length: {len(content) if length is None else length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def of_servers(port: int, seconds: float) -> None:
    with closing(servers.ServerClient(port)) as client:
        assert client.call("POST", "/x", {}, seconds=seconds) == RAN


def of_sandbox(port: int, seconds: float) -> None:
    box = sandbox.HttpSandbox(f"http://user:{SECRET}@127.0.0.1:{port}")
    assert SECRET not in box.name
    assert box.run(Program("python", "1"), [b""])[0].stdout == b"fine"


def of_judge(port: int, seconds: float) -> None:
    address = f"http://user:{SECRET}@127.0.0.1:{port}/v1"
    settings = Settings(address, "m", request_seconds=seconds, deadline_seconds=seconds, retries=2)

    async def ask() -> str:
        judge = Judge(settings)
        try:
            return (await judge.complete([{"role": "user", "content": "?"}])).text
        finally:
            await judge.close()

    assert asyncio.run(ask()) == "fine"


def of_media(port: int, seconds: float) -> None:
    vision: Any = SimpleNamespace(kinds={"image"}, measured=lambda found, *_, **__: replace(found, digest="measured"))
    url = f"http://user:{SECRET}@127.0.0.1:{port}/a.png?key={SECRET}#{SECRET}"
    assert MediaReader(MediaLimits(allow_urls=True), vision).read("image", url).digest == "measured"


@dataclass(frozen=True)
class User:
    """A part of whet that sends requests: its call, its errors, a content that pleases it, how often it tries."""

    call: Callable[[int, float], None]
    errors: tuple[type[Exception], ...]
    fine: bytes
    attempts: int


USERS = {
    "servers": User(of_servers, (servers.HttpError, OSError, ValueError), json.dumps(RAN).encode(), 1),
    "sandbox": User(of_sandbox, (SandboxError,), json.dumps(RAN).encode(), 4),
    "judge": User(of_judge, (RewardError,), json.dumps(CHAT).encode(), 3),
    "media": User(of_media, (DataError,), BUFFER.getvalue(), 3),
}


def sends(*replies: bytes) -> Answer:
    """Sends one reply after the other, the last one for ever, and closes each connection."""
    left = list(replies)

    def answer(connection: socket.socket) -> bool:
        connection.sendall(left.pop(0) if len(left) > 1 else left[0])
        return False

    return answer


def dribbles(start: bytes) -> Answer:
    """Sends a byte now and then, for ever: no single read takes long."""

    def answer(connection: socket.socket) -> bool:
        for place in range(10**6):
            connection.sendall(start[place : place + 1] or b"a")
            time.sleep(0.02)
        return False

    return answer


def floods(connection: socket.socket) -> bool:
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"10000\r\n" + b" " * 2**16 + b"\r\n")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(sandbox, "GRACE_SECONDS", SECONDS)
    monkeypatch.setattr(media, "URL_SECONDS", SECONDS)
    for module, name in ((servers, "MOST_BYTES"), (sandbox, "MOST_BYTES"), (media, "URL_BYTES")):
        monkeypatch.setattr(module, name, REPLY_BYTES)


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], ByHand]]:
    made = list[ByHand]()

    def start(answer: Answer) -> ByHand:
        def quiet(connection: socket.socket) -> bool:
            try:
                return answer(connection)
            except OSError:  # the client went away
                return False

        made.append(ByHand(quiet))
        return made[-1]

    yield start
    for each in made:
        each.close()


Serve = Callable[[Answer], ByHand]
users = pytest.mark.parametrize("user", USERS.values(), ids=USERS)


def failure(user: User, port: int, *, within: float = SECONDS) -> str:
    """The words of the error of a call, which has no secret and came in time."""
    began = time.monotonic()
    with pytest.raises(user.errors) as caught:
        user.call(port, within)
    assert time.monotonic() - began < within + 4.0
    assert SECRET not in f"{caught.value}{caught.value.args}"
    return str(caught.value)


@users
def test_a_server_that_does_well(user: User, serve: Serve) -> None:
    user.call(serve(sends(reply(user.fine))).port, 10.0)


@users
def test_nobody_is_there(user: User) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    assert "Errno 111" in failure(user, port)


@users
def test_a_server_that_hangs_sees_the_connection_close(user: User, serve: Serve) -> None:
    closed = threading.Event()

    def answer(connection: socket.socket) -> bool:
        connection.settimeout(20)
        if not connection.recv(1):
            closed.set()
        return False

    server = serve(answer)
    failure(user, server.port)
    assert closed.wait(10) and server.requests.qsize() == 1


@users
@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\nX: ", reply(b"{", length=10**6)], ids=["head", "body"])
def test_a_server_that_dribbles(user: User, start: bytes, serve: Serve) -> None:
    failure(user, serve(dribbles(start)).port)


@users
@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_fault_that_passes_is_tried_again(user: User, status: int, serve: Serve) -> None:
    server = serve(sends(reply(b"busy", f"{status} No"), reply(user.fine)))
    if user.attempts == 1:
        assert f"{status}: busy" in failure(user, server.port)
    else:
        user.call(server.port, 10.0)


@users
def test_a_fault_that_stays_is_tried_as_often_as_said(user: User, serve: Serve) -> None:
    server = serve(sends(reply(b"busy", "503 No")))
    assert "503: busy" in failure(user, server.port, within=5.0)
    assert server.requests.qsize() == user.attempts


@users
@pytest.mark.parametrize("status", [400, 401, 403, 418, 422])
def test_a_refusal_is_final(user: User, status: int, serve: Serve) -> None:
    server = serve(sends(reply(b"no!", f"{status} No")))
    assert re.search(rf"\b{status}\b", failure(user, server.port))
    assert server.requests.qsize() == 1


@users
def test_a_wait_that_the_server_asks_for(user: User, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "GRACE_SECONDS", 10.0)
    monkeypatch.setattr(media, "URL_SECONDS", 10.0)
    server = serve(sends(reply(b"busy", "429 No", "Retry-After: 1"), reply(user.fine)))
    began = time.monotonic()
    if user.attempts == 1:
        assert "429" in failure(user, server.port)
    else:
        user.call(server.port, 10.0)
        assert time.monotonic() - began >= 1.0


@users
def test_a_wait_after_the_deadline_is_not_begun(user: User, serve: Serve) -> None:
    server = serve(sends(reply(b"busy", "503 No", "Retry-After: 3600")))
    began = time.monotonic()
    assert "503" in failure(user, server.port)
    assert time.monotonic() - began < SECONDS and server.requests.qsize() == 1


@users
@pytest.mark.parametrize("sent", [b"SSH-2.0-x\r\n", reply(b"<html>"), reply(b"{", length=9), b"", b"\0" * 10**6])
def test_garbage(user: User, sent: bytes, serve: Serve) -> None:
    failure(user, serve(sends(sent)).port, within=5.0)


@users
def test_a_reply_that_is_too_long_or_never_ends(user: User, serve: Serve) -> None:
    assert f"{REPLY_BYTES:,} bytes" in failure(user, serve(floods).port, within=20.0)


@users
def test_a_refusal_that_never_ends(user: User, serve: Serve) -> None:
    sent = reply(b"no" * 10**6, "400 No", length=10**9)
    said = failure(user, serve(sends(sent)).port)
    assert "400" in said and len(said) < 2000


@users
def test_another_length_than_that_of_the_content(user: User, serve: Serve) -> None:
    assert "RemoteProtocolError" in failure(user, serve(sends(reply(b"", length=99))).port, within=5.0)
    user.call(serve(sends(reply(user.fine + b"more", length=len(user.fine)))).port, 5.0)


@users
def test_a_redirect_to_elsewhere(user: User, serve: Serve) -> None:
    """Data is fetched from the redirect's target, without the headers for the first server; no other request is
    redirected."""
    other = serve(sends(reply(user.fine)))
    place = f"http://127.0.0.1:{other.port}/b?token={SECRET}"
    server = serve(sends(reply(b"", "302 Found", f"Location: {place}")))
    if user is USERS["media"]:
        user.call(server.port, 10.0)
        assert b"authorization" in server.requests.get().lower()
        assert b"authorization" not in other.requests.get().lower()
    else:
        assert f"302 to http://127.0.0.1:{other.port}/b" in failure(user, server.port)
        assert other.requests.empty()


def test_a_file_of_this_machine_is_no_reply(serve: Serve) -> None:
    server = serve(sends(reply(b"", "302 Found", "Location: file:///etc/passwd")))
    failure(USERS["media"], server.port)
    assert server.requests.qsize() == 1


def wait_seconds(name: str, monkeypatch: pytest.MonkeyPatch, *, asked: Sequence[float] = (0.0,) * 8) -> list[float]:
    """The waits between attempts of a call, which are not waited for."""
    waits = list[float]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def attempt(number: int) -> None:
        raise CallError("busy", seconds=asked[number])

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        with pytest.raises(CallError):
            asyncio.run(insist(attempt, 10**6, len(asked), name))
    return waits


def test_waits_double_differ_and_are_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT_SECONDS", 0.5)
    one, other = wait_seconds("a", monkeypatch), wait_seconds("b", monkeypatch)
    assert one == wait_seconds("a", monkeypatch) and all(a != b for a, b in zip(one, other, strict=True))
    for number, wait in enumerate(one):  # the last attempt has no wait
        most = min(30.0, 0.5 * 2**number)
        assert most / 2 <= wait <= most
    assert len(one) == 7 and wait_seconds("a", monkeypatch, asked=[4.0, 100.0, 0.0])[:2] == [4.0, 100.0]


NONSENSE = ["inf", "1e400", "nan", "-inf", "-5", "soon", "9" * 5000, "Fri, 31 Dec 9999 23:59:59 GMT"]


@pytest.mark.parametrize("after", ["", "100", "date", *NONSENSE], ids=range(11))
def test_the_wait_that_is_read(after: str, serve: Serve) -> None:
    given = email.utils.formatdate(time.time() + 100, usegmt=True) if after == "date" else after
    server = serve(sends(reply(b"", "429 No", f"Retry-After: {given}")))
    with pytest.raises(CallError) as caught:
        fetch("GET", f"http://127.0.0.1:{server.port}/", bytes, seconds=5, attempts=1, most=9)
    is_right = after in ("100", "date")
    assert (90 if is_right else 0) <= caught.value.seconds <= (100 if is_right else http.MOST_ASKED_SECONDS)


def test_an_address_without_its_secrets() -> None:
    for url, bare in (
        ("http://host:80/a/b", "http://host:80/a/b"),
        ("https://user:pass@host/a", "https://host/a"),
        ("https://a@b@host/a@b", "https://host/a@b"),
        ("https://host/a?b=c&d#e", "https://host/a?..."),
        ("https://host#e?f", "https://host"),
        ("http://[::1/v1", "http://[::1/v1"),
    ):
        assert shown(url) == bare


@pytest.mark.parametrize("is_local", [False, True])
def test_proxies_of_the_environment(is_local: bool, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, server = (serve(sends(reply(content))) for content in (b"proxy", b"server"))
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def ask() -> bytes:
        client = Http(is_local=is_local)
        async with client.stream("GET", f"http://127.0.0.1:{server.port}/") as found:
            content = await read(found)
        await client.close()
        return content

    assert asyncio.run(ask()) == (b"server" if is_local else b"proxy")


def test_a_child_of_a_process_that_sent_requests(serve: Serve) -> None:
    server = serve(sends(reply(b"fine")))

    def ask() -> bytes:
        return fetch("GET", f"http://127.0.0.1:{server.port}/", bytes, seconds=10, attempts=1, most=9)

    assert ask() == b"fine"
    if (child := os.fork()) == 0:
        os._exit(0 if ask() == b"fine" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_text_that_is_no_unicode_is_sent(serve: Serve) -> None:
    server = serve(sends(reply(b"fine")))
    body = {"code": "\ud800"}
    fetch("POST", f"http://127.0.0.1:{server.port}/", bytes, seconds=10, attempts=1, most=9, body=body)
    assert json.loads(server.requests.get().partition(b"\r\n\r\n")[2]) == body


async def small_server() -> tuple[asyncio.Server, list[asyncio.StreamWriter]]:
    """A server in this loop that answers each request after 50 ms, and the connections that it accepted."""
    accepted: list[asyncio.StreamWriter] = []

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        with closing(writer):
            while head := await reader.read(65_536):
                assert head.endswith(b"{}")
                await asyncio.sleep(0.05)  # so that all requests are open at the same time
                writer.write(reply(b"fine"))

    return await asyncio.start_server(serve_one, "127.0.0.1", 0, backlog=1024), accepted


def test_a_request_costs_as_much_beside_many_others() -> None:
    async def cost(at_once: int, rounds: int) -> float:
        server, accepted = await small_server()
        address, client = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", Http(is_local=True)

        async def ask() -> None:
            async with client.stream("POST", address, {}) as answer:
                assert await read(answer) == b"fine"

        await asyncio.gather(*(ask() for _ in range(at_once)))
        start = time.process_time()
        for _ in range(rounds):
            await asyncio.gather(*(ask() for _ in range(at_once)))
        seconds = time.process_time() - start
        assert len(accepted) == at_once  # connections are used again
        await client.close()
        server.close()
        return seconds / rounds / at_once

    alone, among_many = (asyncio.run(cost(*each)) for each in ((16, 16), (256, 1)))
    assert among_many < 4 * alone  # 10 times with one client of httpx
