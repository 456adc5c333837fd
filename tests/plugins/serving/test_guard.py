# SPDX-License-Identifier: Apache-2.0
"""Requests that are refused before they are read, and connections whose head never ends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.testclient import TestClient
from test_app import SETTINGS, Hanging
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from whet import guard
from whet.guard import RefusedError, check_client, is_own, with_deadline
from whet.models.load import load_tokenizer, stop_token_ids
from whet.plugins.serving.app import App
from whet.plugins.serving.bodies import BodyReader
from whet.plugins.serving.engine_thread import EngineThread


@pytest.mark.parametrize(
    ("host", "own", "expected"),
    [
        ("127.0.0.1:8000", "127.0.0.1", True),
        ("10.0.0.7", "0.0.0.0", True),
        ("[::1]:80", "::1", True),
        ("LOCALHOST:1", "0.0.0.0", True),
        ("Lab7:80", "lab7", True),
        ("lab7", "LAB7", True),
        (f"{socket.gethostname()}:8000", "0.0.0.0", True),
        ("attacker.example", "127.0.0.1", False),
        ("127.0.0.1.attacker.example", "127.0.0.1", False),
        ("localhost.attacker.example", "localhost", False),
        ("localhost@attacker.example", "localhost", False),
        ("", "", False),
        ("[::1", "::1", False),
        ("lab70", "lab7", False),
        ("localhost:x", "lab7", False),
    ],
)
def test_the_servers_own_names(host: str, own: str, expected: bool) -> None:
    assert is_own(host, own) is expected


def test_a_key_is_asked_for_by_any_name_and_without_one_the_name_counts() -> None:
    right = {"host": "attacker.example", "authorization": "Bearer k"}
    check_client(right, "127.0.0.1", "k")
    for given in ({}, {"authorization": "k"}, {"authorization": "Bearer K"}, {"authorization": "Bearer kk"}):
        with pytest.raises(RefusedError) as refused:
            check_client({"host": "127.0.0.1", **given}, "127.0.0.1", "k")
        assert refused.value.status == 401
    for key in (None, ""):
        with pytest.raises(RefusedError) as refused:
            check_client(right, "127.0.0.1", key)
        assert refused.value.status == 403 and "attacker.example" in str(refused.value)
        check_client({"host": "127.0.0.1", "origin": "http://localhost:3000"}, "127.0.0.1", key)


@pytest.fixture
def app(qwen25_folder: Path) -> Iterator[App]:
    tokenizer = load_tokenizer(qwen25_folder)
    reader = BodyReader("m", tokenizer, stop_token_ids(qwen25_folder, tokenizer), 512, 512, 100)
    engine = Hanging()
    yield App(reader, EngineThread(engine, on_death=lambda error: None), SETTINGS, dict)  # type: ignore[arg-type]
    engine.released.set()


def test_a_name_that_resolves_to_this_machine_uses_no_server_without_a_key(app: App) -> None:
    client = TestClient(app.asgi, base_url="http://127.0.0.1")
    for headers in ({"host": "attacker.example"}, {"origin": "http://attacker.example"}):
        for response in (
            client.get("/v1/models", headers=headers),
            client.get("/metrics", headers=headers),
            client.post("/v1/completions", json={"model": "m", "prompt": "hi"}, headers=headers),
        ):
            assert response.status_code == 403 and "attacker.example" in response.json()["error"]["message"]
        assert client.get("/health", headers=headers).status_code == 200  # as without the key
    assert client.get("/v1/models").status_code == 200
    app._settings = replace(SETTINGS, api_key="k")
    named = {"host": "gateway.example", "authorization": "Bearer k"}
    assert client.get("/v1/models", headers=named).status_code == 200
    assert client.get("/v1/models").status_code == 401


HEADS = [b"", b"GET /", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "]
WHOLE = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.timeout(60)
def test_a_head_that_never_ends_is_closed(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "HEAD_SECONDS", 0.5)
    config = uvicorn.Config(app.asgi, port=0, http=with_deadline(AutoHTTPProtocol), log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * 10)]
    for number, each in enumerate(slow):
        each.sendall(HEADS[number % 3])
    again = socket.create_connection(("127.0.0.1", port))  # its second head never ends
    again.sendall(WHOLE + b"GET ")
    started = time.monotonic()
    while slow:
        assert time.monotonic() - started < 10
        time.sleep(0.1)
        slow = [each for each in slow if is_open(each)]
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    assert again.recv(12) == b"HTTP/1.1 200"
    while is_open(again):
        assert time.monotonic() - started < 10
        time.sleep(0.1)
    server.should_exit = True
    thread.join(10)


@pytest.mark.timeout(60)
def test_a_client_that_waits_for_its_answer_is_not_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(scope: object, receive: object, send: object) -> None:
        import asyncio

        await asyncio.sleep(1.5)
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"done"})  # type: ignore[operator]

    monkeypatch.setattr(guard, "HEAD_SECONDS", 0.2)
    config = uvicorn.Config(late, port=0, http=with_deadline(AutoHTTPProtocol), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    assert httpx.get(f"http://127.0.0.1:{port}/").text == "done"
    server.should_exit = True
    thread.join(10)


def is_open(connection: socket.socket) -> bool:
    """Sends another byte of a head that never ends; tells whether the server still takes it."""
    connection.settimeout(0.01)
    try:
        connection.sendall(b"a")
        while connection.recv(4096):
            pass
        return False
    except TimeoutError:
        return True
    except OSError:
        return False
