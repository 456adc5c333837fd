# SPDX-License-Identifier: Apache-2.0
"""A link through shared memory, for processes of one machine.

A socket carries one byte for each full bucket, and one byte back for each bucket that was read. The memory has no name
that could remain after a crash: its descriptor is sent through the socket, whose folder only this user may enter, and
the kernel frees it with the last process that has it open.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from whet.errors import DeadlineError
from whet.weight_sync.link import BUCKET_BYTES, SLOTS, Inlet, LinkClosedError, Outlet


class SharedMemoryOutlet(Outlet):
    """The sender's end, for a number of receivers; where it `spares` the others, one that fails is left out."""

    def __init__(
        self, receivers: int, deadline_seconds: float, bucket_bytes: int = BUCKET_BYTES, *, spares: bool = False
    ) -> None:
        super().__init__(deadline_seconds)
        self._expected, self._spares = receivers, spares
        self._folder = tempfile.TemporaryDirectory(prefix="whet-weights-")
        self.address = str(Path(self._folder.name, "socket"))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen(receivers)
        self._listener.settimeout(deadline_seconds)
        self._file = os.memfd_create("whet-weights")
        os.ftruncate(self._file, SLOTS * bucket_bytes)
        self._slots = _mapped(self._file)
        self._unread: dict[socket.socket, int] = {}  # buckets, by receiver
        self._posted = 0

    def buffer(self) -> torch.Tensor:
        """Waits until every receiver has read the next slot.  Returns it."""
        self._accept()
        self._wait_for(SLOTS - 1)
        return self._slots[self._posted % SLOTS]

    def post(self, used: int) -> None:
        """Signals to every receiver that the slot is full."""
        self._posted += 1
        for receiver in list(self._unread):
            with self._sparing(receiver, "sending weights to a rollout rank"):
                receiver.sendall(b".")
                self._unread[receiver] += 1

    def finish(self) -> None:
        """Waits until every receiver has read everything."""
        self._wait_for(0)

    def close(self) -> None:
        for each in (self._listener, *self._unread):
            each.close()
        self._folder.cleanup()
        with suppress(OSError):
            os.close(self._file)

    def _accept(self) -> None:
        while len(self._unread) < self._expected:
            with self.waiting("waiting for a rollout rank to connect for weights"):
                connection, _ = self._listener.accept()
                connection.settimeout(self.deadline_seconds)
                self._unread[connection] = 0
            with self._sparing(connection, "sending weights to a rollout rank"):
                socket.send_fds(connection, [b"."], [self._file])
            if len(self._unread) == self._expected:
                self._folder.cleanup()

    def _wait_for(self, unread: int) -> None:
        """Waits until no receiver has more than `unread` buckets to read."""
        for receiver in list(self._unread):
            with self._sparing(receiver, "waiting for a rollout rank to read its weights"):
                while self._unread[receiver] > unread:
                    _read(receiver)
                    self._unread[receiver] -= 1

    @contextmanager
    def _sparing(self, receiver: socket.socket, doing: str) -> Iterator[None]:
        """Waits for a receiver, which is left out where it fails and the outlet `spares` the others."""
        try:
            with self.waiting(doing):
                yield
        except (DeadlineError, LinkClosedError):
            if not self._spares:
                raise
            receiver.close()
            del self._unread[receiver]
            self._expected -= 1


class SharedMemoryInlet(Inlet):
    """A receiver's end. It connects at once, and gets the memory with the first bucket."""

    def __init__(self, address: str, deadline_seconds: float) -> None:
        super().__init__(deadline_seconds)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(deadline_seconds)
        with self.waiting(f"connecting to the weights at {address}"):
            self._socket.connect(address)
        self._slots: torch.Tensor | None = None
        self._num_read = 0

    def bucket(self) -> torch.Tensor:
        """Waits until the next slot is full.  Returns it."""
        with self.waiting("waiting for weights"):
            if self._slots is None:
                _, (file,), _, _ = socket.recv_fds(self._socket, 1, 1)  # ValueError without a descriptor
                self._slots = _mapped(file)
                os.close(file)
            _read(self._socket)
        return self._slots[self._num_read % SLOTS]

    def release(self) -> None:
        """Signals to the sender that the slot has been read."""
        self._num_read += 1
        with self.waiting("releasing a bucket of weights"):
            self._socket.sendall(b".")

    def finish(self) -> None:
        """Does nothing: the last bucket was released after all weights had been verified."""

    def close(self) -> None:
        self._socket.close()
        self._slots = None


def _mapped(file: int) -> torch.Tensor:
    """Maps the file as a tensor [SLOTS, bytes], which keeps the mapping alive."""
    return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8).view(SLOTS, -1)


def _read(connection: socket.socket) -> None:
    if not connection.recv(1):
        raise EOFError("it closed the connection")
