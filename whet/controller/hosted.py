# SPDX-License-Identifier: Apache-2.0
"""The worker side of a call, whatever carried it here: the workers of one process, and their answers."""

from __future__ import annotations

import fcntl
import os
import pickle
import socket
import struct
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from whet import devices
from whet.controller import wire
from whet.controller.dispatch import Arguments, runs_beside
from whet.controller.resource_pool import ResourcePool, cores
from whet.controller.worker import Layout, Placement, Worker, WorkerSpec
from whet.errors import WhetError, WorkerError

BUILD = "__init__"  # the method name of the calls that build a worker: their payload is its WorkerSpec
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True)
class Seat:
    """The place of a process, as it is told before it builds workers."""

    pool: ResourcePool
    rank: int  # in the pool
    device_index: int | None  # among the accelerators that the process sees; None without one of its own
    processes_here: int  # that share the cores
    store: tuple[str, int]  # address and port of the TCPStore where the ranks of the pool find each other
    address: str  # under which other ranks reach this process
    deadline_seconds: float

    def take(self) -> torch.device:
        """Takes this process's share of the cores.  Returns the device to compute on."""
        torch.set_num_threads(max(1, cores() // self.processes_here))
        if self.device_index is None:
            return devices.HOST
        torch.accelerator.set_device_index(self.device_index)
        return devices.here()

    def join(self, device: torch.device) -> None:
        """Waits for the other ranks of the pool and makes the process group."""
        interface = interface_of(self.address)
        if interface is not None:  # unset, gloo asks what address the host's name has
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        timeout = timedelta(seconds=self.deadline_seconds)
        torch.distributed.init_process_group(
            devices.backends(device.type),
            store=PrefixStore(self.pool.name, TCPStore(*self.store, is_master=False, timeout=timeout)),
            rank=self.rank,
            world_size=self.pool.processes,
            timeout=timeout,
        )


class Hosted:
    """The workers of this process. Without a seat it is the only one, and computes on the accelerator if there is one.

    `where`, as " on 10.0.0.2", stands behind a rank in errors."""

    def __init__(self, seat: Seat | None = None, where: str = "") -> None:
        self._seat, self._where = seat, where
        self.by_role: dict[str, Worker] = {}
        self._device = devices.here() if seat is None else seat.take()

    def answer(self, frames: Sequence[wire.Frame]) -> list[wire.Frame]:
        """Serves one call: a pickled (role, method), then the frames of its payload. The answer is (True, result) or
        (False, WhetError)."""
        role, method = pickle.loads(frames[0])
        try:
            return _encode(self.call(role, method, _decode(frames[1:])))
        except (Exception, SystemExit) as error:
            return wire.encode((False, self._portable(error, role, method)))

    def runs_beside(self, frames: Sequence[wire.Frame]) -> bool:
        """Tells whether a call runs beside others."""
        role, method = pickle.loads(frames[0])
        return role in self.by_role and runs_beside(type(self.by_role[role]), method)

    def call(self, role: str, method: str, payload: Arguments | WorkerSpec) -> Any:
        """The result of a worker's method; of BUILD the new worker's layout.  Raises: what the worker raises."""
        if isinstance(payload, WorkerSpec):
            return self._build(payload)
        return getattr(self.by_role[role], method)(*payload.args, **payload.kwargs)

    def describe(self, error: BaseException, role: str, method: str) -> WhetError:
        """A caller's view of an exception in a worker: a WhetError stays what it is, with a note of where it arose;
        anything else becomes a WorkerError with the original as its cause."""
        if isinstance(error, WhetError):
            error.add_note(f"raised in {self._name(role)}, {method}")
            return error
        wrapped = self._wrapped(error, role, method)
        wrapped.__cause__ = error
        return wrapped

    def close(self) -> None:
        """Lets the workers close, the last one built first: it may use the others."""
        while self.by_role:
            self.by_role.popitem()[1].close()
        if self._seat is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _build(self, spec: WorkerSpec) -> Layout:
        seat, rank, world_size = self._seat, 0, 1
        if seat is not None:
            rank, world_size = seat.rank, seat.pool.processes
            if world_size > 1 and not torch.distributed.is_initialized():
                seat.join(self._device)
        worker = spec.build(
            Placement(
                role=spec.role,
                rank=rank,
                world_size=world_size,
                process_group=torch.distributed.group.WORLD if world_size > 1 else None,
                neighbours=self.by_role,
                address=LOOPBACK if seat is None else seat.address,
                device=self._device,
            )
        )
        self.by_role[spec.role] = worker
        return Layout.of(worker)

    def _portable(self, error: BaseException, role: str, method: str) -> WhetError:
        """The described error with its traceback as a note, in a form that the caller can unpickle."""
        trace = f"in the worker process:\n{''.join(traceback.format_exception(error)).rstrip()}"
        described = self.describe(error, role, method)
        described.add_note(trace)
        try:
            pickle.loads(pickle.dumps(described))
        except Exception:  # an error class of a user's own whose constructor takes more than a message
            described = self._wrapped(error, role, method)
            described.add_note(trace)
        return described

    def _wrapped(self, error: BaseException, role: str, method: str) -> WorkerError:
        return WorkerError(f"{self._name(role)}: {method} raised {type(error).__name__}: {error}")

    def _name(self, role: str) -> str:
        return f"{role} rank {0 if self._seat is None else self._seat.rank}{self._where}"


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an IPv4 address."""
    names = [name for _, name in socket.if_nameindex()]
    if address == LOOPBACK:
        return next(name for name in names if name.startswith("lo"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            try:
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24]
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found) == address:
                return name
    return None


def _decode(frames: Sequence[wire.Frame]) -> Any:
    try:
        return wire.decode(frames)
    except Exception as error:
        raise WorkerError(
            f"what it was given cannot be read in a worker process: {error}; classes and functions that travel must "
            "stand in a module that other processes can import"
        ) from error


def _encode(result: Any) -> list[wire.Frame]:
    try:
        return wire.encode((True, result))
    except Exception as error:
        raise WorkerError(
            f"its result, a {type(result).__name__}, cannot travel to another process: {error}"
        ) from error
