# SPDX-License-Identifier: Apache-2.0
"""HTTP of the servers that answer without a model: JSON, and streams of events. This needs Python alone."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN_SECONDS = 0.02  # between two tokens of a slow request


class JsonHandler(BaseHTTPRequestHandler):
    """One thread a connection."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Is silent."""

    def do_GET(self) -> None:
        """Answers."""
        self.get()

    def do_POST(self) -> None:
        """Answers; the body is JSON, or nothing."""
        self.post(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"null"))

    def get(self) -> None:
        """Answers a request that reads."""
        raise NotImplementedError

    def post(self, body: Any) -> None:
        """Answers a request that changes the server."""
        raise NotImplementedError

    def answer(self, value: Any, status: int = 200) -> None:
        """Sends JSON."""
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def begin_stream(self) -> None:
        """Sends the head of a stream of events."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, value: Any) -> None:
        """Sends an event, in two pieces; with None the end."""
        text = b"data: [DONE]\n\n" if value is None else f"data: {json.dumps(value)}\n\n".encode()
        for piece in (text[:9], text[9:]):
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        if value is None:
            self.wfile.write(b"0\r\n\r\n")


def serve(handler: type[JsonHandler]) -> None:
    """Answers at the port that the command line ends with, until killed."""
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[-1])), handler).serve_forever()
