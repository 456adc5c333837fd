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
from whet.controller.resource_pool import cores
from whet.controller.worker import Layout, Placement, Worker, WorkerSpec
from whet.controller.worker_group import describe
from whet.devices import HOST
from whet.errors import WhetError, WorkerError

BUILD = "__init__"  # the method name of the calls that build a worker: their payload is its WorkerSpec
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


@dataclass(frozen=True)
class Seat:
    """What a process is told of its place, before it builds workers."""

    pool: str
    rank: int  # in the pool
    world_size: int  # of the pool
    device_index: int | None  # among the accelerators that the process sees; None without one of its own
    processes_here: int  # that share the cores
    store: tuple[str, int]  # address and port of the TCPStore where the ranks of the pool find each other
    address: str  # under which other ranks reach this process
    deadline_seconds: float


class Hosted:
    """The workers of this process."""

    def __init__(self, seat: Seat, where: str = "") -> None:
        self._seat, self._where = seat, where  # the latter, as " on 10.0.0.2", stands behind a rank in errors
        self._by_role: dict[str, Worker] = {}
        torch.set_num_threads(max(1, cores() // seat.processes_here))
        if seat.device_index is not None:
            torch.accelerator.set_device_index(seat.device_index)
        self._device = HOST if seat.device_index is None else devices.here()

    def answer(self, frames: Sequence[wire.Frame]) -> list[wire.Frame]:
        """Serves one call: a pickled (role, method), then the frames of its payload. The answer is (True, result) or
        (False, WhetError)."""
        role, method = pickle.loads(frames[0])
        try:
            return _encode(self._serve(role, method, _decode(frames[1:])))
        except (Exception, SystemExit) as error:
            return wire.encode((False, _portable(error, f"{role} rank {self._seat.rank}{self._where}", method)))

    def close(self) -> None:
        """Lets the workers close, the last one built first: it may use the others."""
        while self._by_role:
            self._by_role.popitem()[1].close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _serve(self, role: str, method: str, payload: Any) -> Any:
        if method == BUILD:
            return self._build(payload)
        return getattr(self._by_role[role], method)(*payload.args, **payload.kwargs)

    def _build(self, spec: WorkerSpec) -> Layout:
        seat = self._seat
        if seat.world_size > 1 and not torch.distributed.is_initialized():
            _join(seat, self._device.type)
        self._by_role[spec.role] = spec.build(
            Placement(
                role=spec.role,
                rank=seat.rank,
                world_size=seat.world_size,
                process_group=torch.distributed.group.WORLD if seat.world_size > 1 else None,
                neighbours=self._by_role,
                address=seat.address,
                device=self._device,
            )
        )
        return Layout.of(self._by_role[spec.role])


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


def _join(seat: Seat, device_type: str) -> None:
    """Waits for the other ranks of the pool and makes the process group."""
    interface = interface_of(seat.address)
    if interface is not None:  # unset, gloo asks what address the host's name has
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    timeout = timedelta(seconds=seat.deadline_seconds)
    torch.distributed.init_process_group(
        devices.backends(device_type),
        store=PrefixStore(seat.pool, TCPStore(*seat.store, is_master=False, timeout=timeout)),
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timeout,
    )


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


def _portable(error: BaseException, who: str, method: str) -> WhetError:
    """The described error with its traceback as a note, in a form that the caller can unpickle."""
    trace = f"in the worker process:\n{''.join(traceback.format_exception(error)).rstrip()}"
    described = describe(error, who, method)
    described.add_note(trace)
    try:
        pickle.loads(pickle.dumps(described))
    except Exception:  # an error class of a user's own whose constructor takes more than a message
        described = WorkerError(f"{who}: {method} raised {type(error).__name__}: {error}")
        described.add_note(trace)
    return described
