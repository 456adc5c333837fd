# SPDX-License-Identifier: Apache-2.0
"""Buckets by broadcast: from one sender to receivers on other machines, over gloo, or nccl between accelerators.

The ranks of two pools have no process group in common, so this link makes its own: the sender is rank 0. It opens a
store for it on the address under which others reach it; which of them may connect is the network's to decide.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from whet.errors import DeadlineError
from whet.weight_sync.buckets import BUCKET_BYTES, HEADER_BYTES, LinkClosedError, used_bytes

SLOTS = 2


class CollectiveOutlet:
    """The sender's end, for so many receivers; the group is made when the first bucket is asked for."""

    def __init__(
        self,
        receivers: int,
        host: str,
        deadline_seconds: float,
        device: torch.device | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._size, self._host, self._deadline_seconds = 1 + receivers, host, deadline_seconds
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline_seconds),
            master_listen_fd=listener.detach(),
        )
        self.address = f"{host}:{port}"
        self._slots = torch.empty(SLOTS, bucket_bytes, dtype=torch.uint8, device=device)
        self._sending: list[list[dist.Work]] = [[] for _ in range(SLOTS)]
        self._group: Any = None
        self._posted = 0

    def buffer(self) -> torch.Tensor:
        """The next slot, once it was sent."""
        if self._group is None:
            with _named("waiting for rollout ranks to take weights", self._deadline_seconds):
                self._group = _group(self._store, 0, self._size, self._host, self._slots.device, self._deadline_seconds)
        self._wait(self._posted % SLOTS)
        return self._slots[self._posted % SLOTS]

    def post(self, used: int) -> None:
        """Starts to send the slot: first its header, which says how much else there is."""
        slot, bucket = self._posted % SLOTS, self._slots[self._posted % SLOTS]
        with _named("sending weights to rollout ranks", self._deadline_seconds):
            parts = [bucket[:HEADER_BYTES], bucket[HEADER_BYTES:used]]
            self._sending[slot] = [_broadcast(self._group, part) for part in parts if len(part)]
        self._posted += 1

    def finish(self) -> None:
        """Waits until everything was sent and every receiver has verified it."""
        for slot in range(SLOTS):
            self._wait(slot)
        with _named("waiting for rollout ranks to verify their weights", self._deadline_seconds):
            self._group.barrier().wait()

    def close(self) -> None:
        """Lets go of the group."""
        self._sending = [[] for _ in range(SLOTS)]  # each holds the group
        _end(self._group)
        self._group = None

    def _wait(self, slot: int) -> None:
        with _named("sending weights to rollout ranks", self._deadline_seconds):
            while self._sending[slot]:
                self._sending[slot].pop(0).wait()


class CollectiveInlet:
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
        self._address, self._rank, self._size, self._deadline_seconds = address, rank, size, deadline_seconds
        self._bucket = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
        self._group: Any = None

    def bucket(self) -> torch.Tensor:
        """The next bucket, once it is here."""
        with _named("waiting for weights", self._deadline_seconds):
            if self._group is None:
                self._group = self._joined()
            _broadcast(self._group, self._bucket[:HEADER_BYTES]).wait()
            used = used_bytes(self._bucket)
            if used > HEADER_BYTES:
                _broadcast(self._group, self._bucket[HEADER_BYTES:used]).wait()
        return self._bucket

    def release(self) -> None:
        """Nothing to say: the next broadcast waits for this rank."""

    def finish(self) -> None:
        """Tells the sender that all is verified."""
        with _named("telling that the weights are verified", self._deadline_seconds):
            self._group.barrier().wait()

    def close(self) -> None:
        """Lets go of the group."""
        _end(self._group)
        self._group = None

    def _joined(self) -> Any:
        host, _, port = self._address.rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=self._deadline_seconds))
        own = _address_towards(host, int(port))
        return _group(store, self._rank, self._size, own, self._bucket.device, self._deadline_seconds)


def spans(device: torch.device) -> bool:
    """Whether a broadcast can go from one such device to another without the hosts' memory."""
    return dist.Backend.default_device_backend_map.get(device.type) == "nccl"


def _group(
    store: dist.Store, rank: int, size: int, host: str, device: torch.device, deadline_seconds: float
) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
    """Waits for the other ranks."""
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
    """For a link that is closed: nccl breaks off what is under way, gloo when the last reference is gone."""
    if group is not None:
        group.abort()


def _address_towards(host: str, port: int) -> str:
    """The own address on the way to another machine; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


@contextmanager
def _named(doing: str, deadline_seconds: float) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:  # gloo has one error for all
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            raise DeadlineError(
                f"{doing}: the others did not come within {deadline_seconds:g} s; if it may take longer, raise "
                f"cluster.deadline_seconds ({error})"
            ) from error
        raise LinkClosedError(f"{doing}: the other side is gone ({error}); its own error says why") from error
