# SPDX-License-Identifier: Apache-2.0
"""The two kinds of link: a broadcast to other machines, over gloo, or nccl between accelerators; and shared memory, for
processes of one machine.

The ranks of two pools have no common process group, so a broadcast makes its own, with the sender as rank 0. The sender
opens the group's store on the address under which others reach it; nothing but the network restricts who connects.

For shared memory a socket carries one byte for each full bucket, and one byte back for each bucket that was read. The
memory has no name that could remain after a crash: its descriptor is sent through the socket, whose folder only this
user may enter, and the kernel frees it with the last process that has it open.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from whet.devices import open_store
from whet.errors import DeadlineError
from whet.weight_sync.buckets import BUCKET_BYTES, HEADER_BYTES, SLOTS, Inlet, LinkClosedError, Outlet, used_bytes


class CollectiveOutlet(Outlet):
    """The sender's end, for a number of receivers; the group is made for the first bucket."""

    def __init__(
        self,
        receivers: int,
        host: str,
        deadline_seconds: float,
        device: torch.device | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(deadline_seconds)
        self._size, self._host = 1 + receivers, host
        self._store = open_store(host, deadline_seconds)
        self.address = f"{host}:{self._store.port}"
        self._slots = torch.empty(SLOTS, bucket_bytes, dtype=torch.uint8, device=device)
        self._sending: list[list[dist.Work]] = [[] for _ in range(SLOTS)]
        self._group: Any = None
        self._posted = 0

    def buffer(self) -> torch.Tensor:
        """Waits until the next slot has been sent.  Returns it."""
        if self._group is None:
            with self.waiting("waiting for rollout ranks to connect for weights"):
                self._group = _group(self._store, 0, self._size, self._host, self._slots.device, self.deadline_seconds)
        self._wait(self._posted % SLOTS)
        return self._slots[self._posted % SLOTS]

    def post(self, used: int) -> None:
        """Starts to send the slot: first its header, which holds the number of bytes after it."""
        slot, bucket = self._posted % SLOTS, self._slots[self._posted % SLOTS]
        with self.waiting("sending weights to rollout ranks"):
            parts = [bucket[:HEADER_BYTES], bucket[HEADER_BYTES:used]]
            self._sending[slot] = [_broadcast(self._group, part) for part in parts if len(part)]
        self._posted += 1

    def finish(self) -> None:
        for slot in range(SLOTS):
            self._wait(slot)
        with self.waiting("waiting for rollout ranks to verify their weights"):
            self._group.barrier().wait()

    def close(self) -> None:
        self._sending = [[] for _ in range(SLOTS)]  # each work holds the group
        _end(self._group)
        self._group = None

    def _wait(self, slot: int) -> None:
        with self.waiting("sending weights to rollout ranks"):
            while self._sending[slot]:
                self._sending[slot].pop(0).wait()


class CollectiveInlet(Inlet):
    """A receiver's end: `rank` of a group of `size`, in which the sender at `address` is rank 0."""

    def __init__(
        self,
        address: str,
        rank: int,
        size: int,
        deadline_seconds: float,
        device: torch.device | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        super().__init__(deadline_seconds)
        self._address, self._rank, self._size = address, rank, size
        self._bucket = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
        self._group: Any = None

    def bucket(self) -> torch.Tensor:
        with self.waiting("waiting for weights"):
            if self._group is None:
                self._group = self._join()
            _broadcast(self._group, self._bucket[:HEADER_BYTES]).wait()
            used = used_bytes(self._bucket)
            if used > HEADER_BYTES:
                _broadcast(self._group, self._bucket[HEADER_BYTES:used]).wait()
        return self._bucket

    def release(self) -> None:
        """Does nothing: the next broadcast waits for this rank."""

    def finish(self) -> None:
        with self.waiting("confirming that the weights are verified"):
            self._group.barrier().wait()

    def close(self) -> None:
        _end(self._group)
        self._group = None

    def _join(self) -> Any:
        host, _, port = self._address.rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=self.deadline_seconds))
        own = _address_towards(host, int(port))
        return _group(store, self._rank, self._size, own, self._bucket.device, self.deadline_seconds)


def spans(device: torch.device) -> bool:
    """True where a broadcast between two such devices does not go through host memory."""
    return dist.Backend.default_device_backend_map.get(device.type) == "nccl"


def _group(
    store: dist.Store, rank: int, size: int, host: str, device: torch.device, deadline_seconds: float
) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
    """Makes the process group; waits for the other ranks."""
    timeout = timedelta(seconds=deadline_seconds)
    if spans(device):
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices, gloo._timeout = [dist.ProcessGroupGloo.create_device(hostname=host)], timeout
    return dist.ProcessGroupGloo(store, rank, size, gloo)


def _broadcast(group: Any, octets: torch.Tensor) -> dist.Work:
    work: dist.Work = group.broadcast([octets], dist.BroadcastOptions())  # from rank 0
    return work


def _end(group: Any) -> None:
    """Ends the group: nccl aborts pending operations here, gloo when the last reference is dropped."""
    if group is not None:
        group.abort()


def _address_towards(host: str, port: int) -> str:
    """The local address of a route to another machine; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


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
