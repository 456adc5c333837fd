# SPDX-License-Identifier: Apache-2.0
"""Buckets through memory that the processes of one machine share.

The sender has two slots: while receivers read one it fills the other. A socket carries one byte for each bucket that is
full and one back for each that was read. The memory has no name that could be left behind: it is handed over through
the socket, whose folder only this user may enter, and it is gone with the last process that holds it.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from whet.errors import DeadlineError
from whet.weight_sync.buckets import BUCKET_BYTES, LinkClosedError

SLOTS = 2


@dataclass
class _Receiver:
    socket: socket.socket
    unread: int = 0  # buckets


class SharedMemoryOutlet:
    """The sender's end, for so many receivers."""

    def __init__(self, receivers: int, deadline_seconds: float, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._expected, self._deadline_seconds = receivers, deadline_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="whet-weights-")
        self.address = str(Path(self._folder.name, "socket"))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen(receivers)
        self._listener.settimeout(deadline_seconds)
        self._file = _anonymous_file(SLOTS * bucket_bytes)
        self._slots = _mapped(self._file)
        self._receivers: list[_Receiver] = []
        self._posted = 0

    def buffer(self) -> torch.Tensor:
        """The next slot, once every receiver has read what was in it."""
        self._accept()
        self._wait_for(SLOTS - 1)
        return self._slots[self._posted % SLOTS]

    def post(self, used: int) -> None:
        """Tells every receiver that the slot is full."""
        self._posted += 1
        for receiver in self._receivers:
            with _named("sending weights to a rollout rank", self._deadline_seconds):
                receiver.socket.sendall(b".")
            receiver.unread += 1

    def finish(self) -> None:
        """Waits until every receiver has read everything."""
        self._wait_for(0)

    def close(self) -> None:
        """Lets go of sockets and memory."""
        for each in (self._listener, *(receiver.socket for receiver in self._receivers)):
            each.close()
        self._folder.cleanup()
        with suppress(OSError):
            os.close(self._file)

    def _accept(self) -> None:
        while len(self._receivers) < self._expected:
            with _named("waiting for a rollout rank to take weights", self._deadline_seconds):
                connection, _ = self._listener.accept()
                connection.settimeout(self._deadline_seconds)
                self._receivers.append(_Receiver(connection))
                socket.send_fds(connection, [b"."], [self._file])
            if len(self._receivers) == self._expected:
                self._folder.cleanup()

    def _wait_for(self, unread: int) -> None:
        """Until no receiver has more than so many buckets to read."""
        for receiver in self._receivers:
            while receiver.unread > unread:
                with _named("waiting for a rollout rank to read its weights", self._deadline_seconds):
                    _read(receiver.socket)
                receiver.unread -= 1


class SharedMemoryInlet:
    """A receiver's end. It connects at once; the memory comes with the first bucket."""

    def __init__(self, address: str, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(deadline_seconds)
        with _named(f"connecting to the weights at {address}", deadline_seconds):
            self._socket.connect(address)
        self._slots: torch.Tensor | None = None
        self._read = 0

    def bucket(self) -> torch.Tensor:
        """The next slot, once it is full."""
        with _named("waiting for weights", self._deadline_seconds):
            if self._slots is None:
                _, (file,), _, _ = socket.recv_fds(self._socket, 1, 1)
                self._slots = _mapped(file)
                os.close(file)
            _read(self._socket)
        return self._slots[self._read % SLOTS]

    def release(self) -> None:
        """Tells the sender that the slot was read."""
        self._read += 1
        with _named("giving a bucket of weights back", self._deadline_seconds):
            self._socket.sendall(b".")

    def finish(self) -> None:
        """Nothing more to say: the last bucket was given back after all was verified."""

    def close(self) -> None:
        """Lets go of socket and memory."""
        self._socket.close()
        self._slots = None


def _anonymous_file(size: int) -> int:
    """A file in memory, without a name; where the system has none, one that was deleted at once."""
    if "memfd_create" in vars(os):
        file = os.memfd_create("whet-weights")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file


def _mapped(file: int) -> torch.Tensor:
    """The file's bytes as its slots; the tensor keeps the mapping alive."""
    return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8).view(SLOTS, -1)


def _read(connection: socket.socket) -> None:
    if not connection.recv(1):
        raise EOFError("it closed the connection")


@contextmanager
def _named(doing: str, deadline_seconds: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise DeadlineError(
            f"{doing}: nothing came within {deadline_seconds:g} s; if it may take longer, raise "
            "cluster.deadline_seconds"
        ) from error
    except (OSError, EOFError, ValueError) as error:  # ValueError: no file came with the first byte
        raise LinkClosedError(f"{doing}: the other side is gone ({error}); its own error says why") from error
