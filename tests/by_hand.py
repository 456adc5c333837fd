# SPDX-License-Identifier: Apache-2.0
"""A server whose answers are written by hand over a socket, so that it can do anything wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from queue import Queue

Answer = Callable[[socket.socket], bool]  # tells whether the connection stays open


class ByHand:
    """Reads one request at a time, and lets `answer` write the response."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.requests, self.num_connections = answer, Queue[bytes](), 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.num_connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            while head := _head(connection):
                self.requests.put(head)
                if not self.answer(connection):
                    return

    def close(self) -> None:
        self.listener.close()


def _head(connection: socket.socket) -> bytes:
    """A request: its head, and as many bytes as it says."""
    found = b""
    while b"\r\n\r\n" not in found:
        if not (part := connection.recv(1)):
            return b""
        found += part
    sizes = [line for line in found.lower().splitlines() if line.startswith(b"content-length:")]
    left = int(sizes[0].split(b":")[1]) if sizes else 0
    while left:
        found += (part := connection.recv(left))
        left -= len(part)
    return found


def always(content: bytes) -> Answer:
    def answer(connection: socket.socket) -> bool:
        connection.sendall(content)
        return True

    return answer
