# SPDX-License-Identifier: Apache-2.0
"""The client of a server of this machine, against a server that answers by hand over a socket."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from queue import Queue

import pytest

from tests.by_hand import Answer, ByHand, always
from whet.plugins.inference.servers.process import HttpError, ServerClient

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 8\r\n\r\n"


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], tuple[ByHand, ServerClient]]]:
    made = list[ByHand | ServerClient]()

    def start(answer: Answer) -> tuple[ByHand, ServerClient]:
        server = ByHand(answer)
        client = ServerClient(server.port)
        made.extend((client, server))
        return server, client

    yield start
    for each in made:
        each.close()


Serve = Callable[[Answer], tuple[ByHand, ServerClient]]


def test_a_body_goes_out_and_json_comes_back_over_one_connection(serve: Serve) -> None:
    server, client = serve(always(JSON + b'{"a": 1}'))
    for _ in range(3):
        assert client.call("POST", "/x?y=1", {"b": [2, "ü"]}, seconds=10) == {"a": 1}
    head, _, body = server.requests.get().partition(b"\r\n\r\n")
    assert head.startswith(b"POST /x?y=1 HTTP/1.1\r\n") and json.loads(body) == {"b": [2, "ü"]}
    assert client.call("GET", "/health", seconds=10) == {"a": 1}
    assert server.num_connections == 1


def test_text_is_text(serve: Serve) -> None:
    _, client = serve(always(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\n\r\na\xff\n"))
    assert client.call("GET", "/metrics", seconds=10) == "a\ufffd\n"


def test_events_are_lines_of_json_however_they_are_cut(serve: Serve) -> None:
    """A line separator of Unicode inside a text ends no line."""
    events = 'data: {"text": "a\u2028b"}\n\ndata: {"n": 2}\n\n: a remark\n\ndata: [DONE]\n\n'.encode()
    parts = [events[:9], events[9:21], events[21:22], events[22:]]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    _, client = serve(always(head + chunks + b"0\r\n\r\n"))

    async def read() -> list[object]:
        return [each async for each in client.events("/generate", {})]

    assert client.start(read()).result(10) == [{"text": "a\u2028b"}, {"n": 2}]


def test_another_status_is_an_error_with_the_body(serve: Serve) -> None:
    refused = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: 8\r\n\r\nno space"
    _, client = serve(always(refused))
    with pytest.raises(HttpError, match="400: no space"):
        client.call("POST", "/x", {}, seconds=10)

    async def read() -> list[object]:
        return [each async for each in client.events("/generate", {})]

    with pytest.raises(HttpError, match="400: no space"):
        client.start(read()).result(10)


def test_at_the_deadline_the_server_sees_the_connection_close(serve: Serve) -> None:
    closed = Queue[bytes]()

    def answer(connection: socket.socket) -> bool:
        connection.settimeout(20)
        closed.put(connection.recv(1))
        return False

    _, client = serve(answer)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        client.call("POST", "/x", {}, seconds=1.0)
    assert time.monotonic() - began < 5 and closed.get(timeout=10) == b""


@pytest.mark.parametrize("sent", [b"", JSON, JSON + b'{"a"'])
def test_a_connection_that_breaks_is_an_error_of_connections(serve: Serve, sent: bytes) -> None:
    def answer(connection: socket.socket) -> bool:
        connection.sendall(sent)
        return False

    _, client = serve(answer)
    with pytest.raises(ConnectionError):
        client.call("POST", "/x", {}, seconds=10)


def test_a_connection_that_the_server_closed_meanwhile_is_not_used_again(serve: Serve) -> None:
    def answer(connection: socket.socket) -> bool:
        connection.sendall(JSON + b'{"a": 1}')
        return False

    server, client = serve(answer)
    for number in range(1, 4):
        assert client.call("GET", "/x", seconds=10) == {"a": 1}
        assert server.num_connections == number
        time.sleep(0.1)


def test_nobody_listens() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    with closing(ServerClient(port)) as client, pytest.raises(ConnectionError):
        client.call("GET", "/health", seconds=10)


def test_close_ends_calls_that_run(serve: Serve) -> None:
    def answer(connection: socket.socket) -> bool:
        connection.settimeout(20)
        connection.recv(1)
        return False

    server, client = serve(answer)
    call = client.start(client.answer("POST", "/x", {}, seconds=None))
    server.requests.get(timeout=10)
    client.close()
    assert call.cancelled() or call.exception(5) is not None
    client.close()
