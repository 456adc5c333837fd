# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible endpoint over real HTTP, which behaves as a test tells it to."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """A status, a body, and a fault of the connection."""

    text: str = "Verdict: yes"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    is_cut: bool = False
    raw: bytes | None = None
    finish_reason: str = "stop"


Behaviour = Callable[[dict[str, Any]], Reply]  # of the body of a request


class Judge:
    """Records the requests to the server, and its replies: in turn, the last one forever; or by a function."""

    def __init__(self, replies: Sequence[Reply | str] | Behaviour) -> None:
        self._replies = replies
        self._lock = threading.Lock()
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.running = self.most = 0
        self.address = ""

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        """Replies to a request."""
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.times.append(time.monotonic())
            self.bodies.append(body)
            self.keys.append(handler.headers.get("Authorization"))
            self.paths.append(handler.path)
            self.running += 1
            self.most = max(self.most, self.running)
            count = len(self.bodies)
        try:
            reply = (
                self._replies(body) if callable(self._replies) else self._replies[min(count, len(self._replies)) - 1]
            )
            reply = Reply(reply) if isinstance(reply, str) else reply
            time.sleep(reply.seconds)
            if reply.is_cut:
                handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
                handler.connection.shutdown(socket.SHUT_RDWR)
                return
            usage = {"prompt_tokens": 100, "completion_tokens": 10}
            content: Any = [
                {"message": {"role": "assistant", "content": reply.text}, "finish_reason": reply.finish_reason}
            ]
            content = {"choices": content, "usage": usage}
            data = json.dumps(content).encode() if reply.raw is None else reply.raw
            handler.send_response(reply.status)
            for name, value in {"Content-Length": str(len(data)), **reply.headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(data)
        finally:
            with self._lock:
                self.running -= 1


@contextmanager
def judging(replies: Sequence[Reply | str] | Behaviour) -> Iterator[Judge]:
    """Starts a judge, whose address belongs to its API."""
    judge = Judge(replies)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            try:
                judge.handle(self)
            except OSError:  # the client went away
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    judge.address = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
