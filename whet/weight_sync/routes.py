# SPDX-License-Identifier: Apache-2.0
"""Weight sync between processes: chooses a sender and a kind of link for each receiver, and runs a sync. There are two
kinds of link: a broadcast to other machines, over gloo, or over nccl between accelerators; and shared memory between
processes of one machine.

The ranks of two pools have no common process group, so a broadcast makes its own, with the sender as rank 0. The sender
opens the group's store on the address at which others reach it; nothing but the network restricts who connects.

For shared memory a socket carries one byte for each full bucket, and one byte back for each bucket that was read. The
memory has no name that could remain after a crash: its descriptor is sent through the socket, whose folder only this
user may enter, and the kernel frees it with the last process that has it open."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from whet.controller.worker_group import WorkerGroup
from whet.devices import open_store
from whet.errors import DeadlineError, LostWorkerError, WeightSyncError
from whet.weight_sync.buckets import (
    BUCKET_BYTES,
    HEADER_BYTES,
    SLOTS,
    Broken,
    Inlet,
    LinkClosedError,
    Outlet,
    used_bytes,
)

Way = Literal["memory", "broadcast"]
Loss = LostWorkerError | DeadlineError
# Sends a version of the weights to the rollout, and returns their digest; see `BetweenPools`.
WeightSync = Callable[..., str]


@dataclass(frozen=True)
class RankSite:
    """The machine, address and accelerator of a rank."""

    machine: str  # equal for processes that can share memory
    address: str  # under which other machines reach it
    accelerator: str | None = None  # unique identifier of the rank's device, if broadcasts can bypass host memory

    @classmethod
    def here(cls, address: str, device: torch.device) -> RankSite:
        """Returns the site of this process, which computes on `device` and is reached at `address`."""
        folder = Path(tempfile.gettempdir()).stat()  # containers with separate files cannot share sockets either
        accelerator = str(torch.get_device_module(device).get_device_properties(device).uuid) if spans(device) else None
        return cls(f"{socket.gethostname()} {folder.st_dev} {folder.st_ino}", address, accelerator)


@dataclass(frozen=True)
class Route:
    """The route of the weights to one rank of the rollout. `address` is set after the sender has opened its end."""

    sender: int  # rank
    way: Way
    rank: int  # in the broadcast, where the sender is rank 0
    size: int  # of the broadcast's group
    on_accelerator: bool
    address: str = ""


def plan_routes(senders: Sequence[RankSite], receivers: Sequence[RankSite]) -> list[Route]:
    """Chooses a route for each receiver.

    If rank 0 and all receivers have distinct accelerators, rank 0 broadcasts. Otherwise weights go through shared
    memory from the first training rank on the receiver's machine; without such a rank, rank 0 broadcasts."""
    devices = [senders[0].accelerator, *(receiver.accelerator for receiver in receivers)]
    on_accelerator = None not in devices and len(set(devices)) == len(devices)
    first_on = {sender.machine: rank for rank, sender in reversed(list(enumerate(senders)))}
    is_near = [receiver.machine in first_on and not on_accelerator for receiver in receivers]
    size, routes, rank = 1 + is_near.count(False), list[Route](), 0
    for receiver, near in zip(receivers, is_near, strict=True):
        if near:
            routes.append(Route(first_on[receiver.machine], "memory", 0, 0, False))
        else:
            rank += 1
            routes.append(Route(0, "broadcast", rank, size, on_accelerator))
    return routes


def with_addresses(routes: Sequence[Route], opened: Sequence[dict[Way, str]]) -> list[Route]:
    """Returns the routes with the addresses of the outlets that the training ranks opened."""
    return [replace(route, address=opened[route.sender][route.way]) for route in routes]


def open_outlets(
    routes: Sequence[Route], sender: int, address: str, deadline_seconds: float, device: torch.device
) -> dict[Way, Outlet]:
    """Opens the outlets of a training rank that computes on `device`. Receivers of a broadcast connect to `address`."""
    own = [route for route in routes if route.sender == sender]
    near, far = ([route for route in own if route.way == way] for way in ("memory", "broadcast"))
    outlets: dict[Way, Outlet] = {}
    if near:
        outlets["memory"] = SharedMemoryOutlet(len(near), deadline_seconds, spares=True)
    if far:
        where = device if far[0].on_accelerator else None
        outlets["broadcast"] = CollectiveOutlet(len(far), address, deadline_seconds, where)
    return outlets


def open_inlet(route: Route, deadline_seconds: float, device: torch.device) -> Inlet:
    """Opens the inlet of a receiver that computes on `device`."""
    if route.way == "memory":
        return SharedMemoryInlet(route.address, deadline_seconds)
    where = device if route.on_accelerator else None
    return CollectiveInlet(route.address, route.rank, route.size, deadline_seconds, where)


def weight_sync(actor: WorkerGroup, rollout: WorkerGroup, dtype: str, deadline_seconds: float) -> WeightSync:
    """Chooses how weights are sent: by `rollout.sync` if each rollout rank has an actor rank in its process, else by
    `BetweenPools`. `dtype` is the dtype of the rollout."""
    if all(rollout.is_beside_actor()):
        return lambda version, *_: _common(rollout.sync(version), version)
    return BetweenPools(actor, rollout, dtype, deadline_seconds)


class BetweenPools:
    """Sends the actor's weights to rollout ranks in other processes; a call sends one version.

    Links are opened for the first version and reused until the ranks change. Senders and receivers are called at the
    same time and wait for each other, for one bucket at most half of `deadline_seconds`: so the sender keeps its own
    deadline if a receiver hangs. Even if the rollout accepts deltas, the first version over a link is sent whole."""

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, dtype: str, deadline_seconds: float) -> None:
        self._actor, self._rollout, self._dtype = actor, rollout, dtype
        self._deadline_seconds = deadline_seconds
        self._only_adapter, self._as_delta = all(rollout.takes_adapter()), all(rollout.takes_delta())
        self._linked: Mapping[int, int] = {}  # ranks that have a link

    def __call__(
        self, version: int, ranks: Mapping[int, int] | None = None, lost: dict[int, Loss] | None = None
    ) -> str:
        """Sends one version to the rollout ranks in `ranks` (by default all). The value of a rank is a number that
        changes when its process is replaced. `lost` collects ranks that are lost; without it, a loss is an error.

        Raises: WeightSyncError, DeadlineError, WorkerError."""
        ranks = ranks or dict.fromkeys(self._rollout.reporting, 0)
        losses = dict[int, Loss]()
        while True:
            left = {rank: number for rank, number in ranks.items() if rank not in losses}
            if left != self._linked:
                self._open(left, losses)
            receivers, self._linked = {rank: (version,) for rank in left if rank not in losses}, {}
            before = len(losses)
            with ThreadPoolExecutor(2) as threads:  # a pool of one process may be this process, where a call blocks
                calls = [
                    threads.submit(self._actor.publish, version, self._dtype, self._only_adapter, self._as_delta),
                    threads.submit(self._on, "receive", receivers, losses),
                ]
            errors = [error for call in calls if (error := call.exception()) is not None]
            digests = [digest for call in calls if call.exception() is None for digest in call.result()]
            broken = [each.error for each in digests if isinstance(each, Broken)]
            is_for_others = lost is not None and before < len(losses) < len(ranks)
            if errors or not (broken and is_for_others):  # else a lost rank broke the links of other ranks: send again
                break
        if errors or broken or lost is None or len(losses) == len(ranks):
            errors += [*losses.values(), *broken]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, LinkClosedError))  # the cause before its effect
        if lost is not None:
            lost.update(losses)
        self._linked = {} if losses else dict(ranks)
        return _common(digests, version)

    def _open(self, ranks: Iterable[int], lost: dict[int, Loss]) -> None:
        """Opens links to ranks, and closes earlier ones. Starts again if a rank is lost meanwhile."""
        left, seconds = None, self._deadline_seconds / 2
        while left is None or len(left) > len(self._on("open_inlet", left, lost)):
            asked = [rank for rank in ranks if rank not in lost]
            sites = self._on("site", dict.fromkeys(asked, ()), lost)
            routes = plan_routes(self._actor.site(), sites)
            routes = with_addresses(routes, self._actor.open_outlets(routes, seconds))
            there = [rank for rank in asked if rank not in lost]
            left = {rank: (route, seconds) for rank, route in zip(there, routes, strict=True)}

    def _on(self, method: str, arguments: Mapping[int, tuple[Any, ...]], lost: dict[int, Loss]) -> list[Any]:
        """Calls `method` on rollout ranks at the same time.  Returns the results. `lost` collects the lost ranks."""
        calls = {rank: self._rollout.start_on(rank, method, *each) for rank, each in arguments.items()}
        found = list[Any]()
        for rank, call in calls.items():
            try:
                found.append(call.result())
            except (LostWorkerError, DeadlineError) as error:
                if not call.is_lost:
                    raise
                lost[rank] = error
        return found


def _common(digests: Iterable[str | None], version: int) -> str:
    """Returns the digest that all ranks share.  Raises: WeightSyncError if they differ."""
    found = {digest for digest in digests if digest is not None}
    if len(found) != 1:
        shown = ", ".join(sorted(found))
        raise WeightSyncError(f"version {version}: digests", shown, "the same weights, of one digest, on all ranks")
    return found.pop()


class CollectiveOutlet(Outlet):
    """The sender's end of a broadcast to several receivers. The first bucket makes the process group."""

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
        """Returns the next slot, after its previous content has been sent."""
        if self._group is None:
            with self.waiting("waiting for rollout ranks to connect for weights"):
                self._group = _group(self._store, 0, self._size, self._host, self._slots.device, self.deadline_seconds)
        self._wait(self._posted % SLOTS)
        return self._slots[self._posted % SLOTS]

    def post(self, used: int) -> None:
        """Starts to send the slot: first its header, which says how many bytes follow, then these bytes."""
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
        self._sending = [[] for _ in range(SLOTS)]  # each pending operation keeps the group alive
        _end(self._group)
        self._group = None

    def _wait(self, slot: int) -> None:
        with self.waiting("sending weights to rollout ranks"):
            while self._sending[slot]:
                self._sending[slot].pop(0).wait()


class CollectiveInlet(Inlet):
    """A receiver's end of a broadcast: `rank` in a group of `size`, in which the sender at `address` is rank 0."""

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
        """Does nothing, because the next broadcast waits for this rank."""

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
    """Tells whether a broadcast between two devices of this type bypasses host memory."""
    return dist.Backend.default_device_backend_map.get(device.type) == "nccl"


def _group(
    store: dist.Store, rank: int, size: int, host: str, device: torch.device, deadline_seconds: float
) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
    """Makes the process group, after waiting for the other ranks."""
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
    """Returns the local address on the route to another machine; sends nothing."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


@contextmanager
def _short(path: str) -> Iterator[str]:
    """Yields a path to the same file through an open folder: the path of a socket has at most 107 bytes."""
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


class SharedMemoryOutlet(Outlet):
    """The sender's end of shared memory for several receivers. With `spares`, only a receiver that fails is dropped."""

    def __init__(
        self, receivers: int, deadline_seconds: float, bucket_bytes: int = BUCKET_BYTES, *, spares: bool = False
    ) -> None:
        super().__init__(deadline_seconds)
        self._expected, self._spares = receivers, spares
        self._folder = tempfile.TemporaryDirectory(prefix="whet-weights-")
        self.address = str(Path(self._folder.name, "socket"))
        self._listener = socket.socket(socket.AF_UNIX)
        with _short(self.address) as path:
            self._listener.bind(path)
        self._listener.listen(receivers)
        self._listener.settimeout(deadline_seconds)
        self._file = os.memfd_create("whet-weights")
        os.ftruncate(self._file, SLOTS * bucket_bytes)
        self._slots = _mapped(self._file)
        self._unread: dict[socket.socket, int] = {}  # buckets, by receiver
        self._posted = 0

    def buffer(self) -> torch.Tensor:
        """Returns the next slot, after every receiver has read its previous content."""
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
        """Handles the failure of `receiver` in the block: with `spares` drops this receiver, else raises the error."""
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
    """A receiver's end of shared memory. It connects at once, and gets the memory with the first bucket."""

    def __init__(self, address: str, deadline_seconds: float) -> None:
        super().__init__(deadline_seconds)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(deadline_seconds)
        with self.waiting(f"connecting to the weights at {address}"), _short(address) as path:
            self._socket.connect(path)
        self._slots: torch.Tensor | None = None
        self._num_read = 0

    def bucket(self) -> torch.Tensor:
        """Returns the next slot after it is full."""
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
        """Does nothing, because the last bucket is released only after all weights are verified."""

    def close(self) -> None:
        self._socket.close()
        self._slots = None


def _mapped(file: int) -> torch.Tensor:
    """Maps a file as a tensor [SLOTS, bytes], which keeps the mapping alive."""
    return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8).view(SLOTS, -1)


def _read(connection: socket.socket) -> None:
    if not connection.recv(1):
        raise EOFError("it closed the connection")
