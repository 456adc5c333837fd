# SPDX-License-Identifier: Apache-2.0
"""A link by broadcast: from one sender to receivers on other machines, over gloo, or nccl between accelerators.

The ranks of two pools have no common process group, so the link makes its own, with the sender as rank 0. The sender
opens the group's store on the address under which others reach it; nothing but the network restricts who connects.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from whet.devices import open_store
from whet.weight_sync.buckets import HEADER_BYTES, used_bytes
from whet.weight_sync.link import BUCKET_BYTES, SLOTS, Inlet, Outlet


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
