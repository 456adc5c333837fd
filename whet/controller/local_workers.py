# SPDX-License-Identifier: Apache-2.0
"""The worker's side of a call. `LocalWorkers` runs the calls of one process, for every transport. `prepare` returns the
main function of a worker process on this machine, which serves calls in order until its caller closes the connection.

In it a reader thread takes the next call from the socket at any time; the main thread runs the workers and replies. A
concurrent call has its own thread. torch is loaded once, in the template process, which uses no device."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import pickle
import queue
import socket
import struct
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import process, spawn
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from whet import devices
from whet.controller import wire
from whet.controller.dispatch import Arguments, is_concurrent
from whet.controller.worker import Host, Placement, RankLayout, ResourcePool, Worker, WorkerSpec, cores
from whet.errors import WhetError, WorkerError
from whet.processes.frames import BrokenMessageError, Frame, send
from whet.processes.template import Caller, Serve, name_process, sendable

BUILD = "__init__"  # the method name of the calls that build a worker: their payload is its WorkerSpec
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
PUT_MAIN = 'put `if __name__ == "__main__":` around the statements of the script'
SOCKET_BYTES = 1 << 20  # buffered by the kernel: 1.6 times the throughput of Linux's default
Inbox = queue.SimpleQueue[tuple[int, list[Frame]] | None]


@dataclass(frozen=True)
class RankSpec:
    """The settings of a worker process, sent to it before it builds workers."""

    pool: ResourcePool
    rank: int  # in the pool
    device_index: int | None  # among the accelerators that the process sees; None: it computes on the host
    devices_here: int  # devices (at least one each) of all processes that share the cores of the machine
    store: tuple[str, int]  # address and port of the TCPStore where the ranks of the pool find each other
    address: str  # under which other ranks reach this process
    deadline_seconds: float
    hosts: tuple[Host, ...] = ()  # of all ranks of the pool, if they may be on several machines

    def set_device(self) -> torch.device:
        """Limits torch to this process's share of the cores.  Returns the device to compute on."""
        torch.set_num_threads(max(1, cores() // self.devices_here))
        if self.device_index is None:
            return devices.HOST
        torch.accelerator.set_device_index(self.device_index)
        devices.take_share(self.pool.share)
        return devices.here()

    def join_group(self, device: torch.device) -> None:
        """Waits for the other ranks of the pool and makes the process group."""
        interface = interface_of(self.address)
        if interface is not None:  # without it gloo uses the address of the host's name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        timeout = timedelta(seconds=self.deadline_seconds)
        torch.distributed.init_process_group(
            devices.backends(device.type),
            store=PrefixStore(self.pool.name, TCPStore(*self.store, is_master=False, timeout=timeout)),
            rank=self.rank,
            world_size=self.pool.processes,
            timeout=timeout,
        )


class LocalWorkers:
    """The workers of this process. Without a `spec` this is the only process, and computes on the accelerator, if any.

    `where`, such as " on 10.0.0.2", is appended to the rank in errors."""

    def __init__(self, spec: RankSpec | None = None, where: str = "") -> None:
        self._spec, self._where = spec, where
        self.by_role: dict[str, Worker] = {}
        self._device = devices.here() if spec is None else spec.set_device()
        devices.keep_freed_memory()

    def serve(self, frames: Sequence[wire.Frame]) -> list[wire.Frame]:
        """Serves one call. Its frames are a pickled (role, method), then the payload.  Returns the frames of the reply:
        (True, result) or (False, WhetError)."""
        role, method = pickle.loads(frames[0])
        try:
            place = f"{self._name(role)}, {method}"
            return _encode(self.call(role, method, _decode(frames[1:], place)), place)
        except (Exception, SystemExit) as error:
            return wire.encode((False, self._portable(error, role, method)))

    def is_concurrent(self, frames: Sequence[wire.Frame]) -> bool:
        """Tells whether the call in `frames` is of a concurrent method, which runs at the same time as other calls."""
        role, method = pickle.loads(frames[0])
        return role in self.by_role and is_concurrent(type(self.by_role[role]), method)

    def call(self, role: str, method: str, payload: Arguments | WorkerSpec) -> Any:
        """Calls a worker's method.  Returns its result; for a WorkerSpec, builds the worker and returns its layout."""
        if isinstance(payload, WorkerSpec):
            return self.build(payload)
        return getattr(self.by_role[role], method)(*payload.args, **payload.kwargs)

    def describe(self, error: BaseException, role: str, method: str) -> WhetError:
        """Converts an exception of a worker for the caller: a WhetError gets a note with role, rank and method; any
        other exception becomes the cause of a WorkerError."""
        if isinstance(error, WhetError):
            error.add_note(f"raised in {self._name(role)}, {method}")
            return error
        wrapped = self._wrapped(error, role, method)
        wrapped.__cause__ = error
        return wrapped

    def close(self) -> None:
        """Closes the workers in reverse order of building, because a later one may use an earlier one."""
        while self.by_role:
            self.by_role.popitem()[1].close()
        if self._spec is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def build(self, spec: WorkerSpec) -> RankLayout:
        """Builds a worker, and joins the pool's process group first if it needs one.  Returns the worker's layout."""
        own, rank, world_size = self._spec, 0, 1
        if own is not None:
            rank, world_size = own.rank, own.pool.processes
            if world_size > 1 and not spec.cls.is_replica and not torch.distributed.is_initialized():
                own.join_group(self._device)
        placement = Placement(
            role=spec.role,
            rank=rank,
            world_size=world_size,
            process_group=torch.distributed.group.WORLD if torch.distributed.is_initialized() else None,
            neighbours=self.by_role,
            address=LOOPBACK if own is None else own.address,
            device=self._device,
            hosts=() if own is None else own.hosts,
        )
        worker = self.by_role[spec.role] = spec.cls(placement, *spec.args, **spec.kwargs)
        return RankLayout(worker.dp_rank, worker.dp_size, worker.is_reporting)

    def _portable(self, error: BaseException, role: str, method: str) -> WhetError:
        """Describes an error in a form that the caller can unpickle, with the traceback as a note."""
        trace = f"in the worker process:\n{''.join(traceback.format_exception(error)).rstrip()}"
        described = self.describe(error, role, method)
        described.add_note(trace)
        try:
            pickle.loads(pickle.dumps(described))
        except Exception:  # a user's error class with a constructor of its own, or a value in a field
            described = self._wrapped(error, role, method)
            described.add_note(trace)
        return described

    def _wrapped(self, error: BaseException, role: str, method: str) -> WorkerError:
        place = f"{self._name(role)}, {method}"
        if isinstance(error, WhetError):
            return sendable(WorkerError, error).at(f"{place}: {type(error).__name__}")
        return WorkerError(place, f"raised {type(error).__name__}: {error}", change="read the worker's traceback")

    def _name(self, role: str) -> str:
        return f"{role} rank {0 if self._spec is None else self._spec.rank}{self._where}"


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface with this IPv4 address."""
    names = [name for _, name in socket.if_nameindex()]
    if address == LOOPBACK:
        return next(name for name in names if name.startswith("lo"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            try:
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24]
            except OSError:  # the interface has no address
                continue
            if socket.inet_ntoa(found) == address:
                return name
    return None


def _decode(frames: Sequence[wire.Frame], place: str) -> Any:
    try:
        return wire.decode(frames)
    except Exception as error:
        expected = "classes and functions of modules that other processes can import"
        raise WorkerError(f"{place}: arguments", f"cannot be unpickled here ({error})", expected) from error


def _encode(result: Any, place: str) -> list[wire.Frame]:
    try:
        return wire.encode((True, result))
    except Exception as error:
        found = f"a {type(result).__name__} that does not pickle ({error})"
        raise WorkerError(f"{place}: result", found, "plain values, tensors, and objects of a module") from error


def main_module() -> dict[str, Any]:
    """Describes the main module of this program, so that workers can import it.  Raises: RuntimeError in a worker."""
    data = spawn.get_preparation_data("")
    return {name: value for name, value in data.items() if name in ("dir", "sys_argv") or name.startswith("init_main")}


def prepare(main: bytes) -> Serve:
    """Loads torch in the template process, for the workers forked from it.  Returns the workers' main function."""
    importlib.import_module("whet.controller.local_workers")
    return partial(_serve, pickle.loads(main))


def _serve(main: dict[str, Any], caller: Caller) -> None:
    caller.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    vars(process.current_process())["_inheriting"] = True  # so that a launch in the main module is an error
    spawn.prepare(main)
    del vars(process.current_process())["_inheriting"]

    from whet.controller import wire
    from whet.controller.local_workers import LocalWorkers

    spec: RankSpec = pickle.loads(caller.receive()[1])
    name_process(f"{spec.pool.name} {spec.rank}")
    workers = LocalWorkers(spec)
    inbox: Inbox = queue.SimpleQueue()
    sending = threading.Lock()

    def serve(number: int, call: list[Frame]) -> None:
        reply = workers.serve(call)
        with sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the caller has ended
            caller.end_copy()
            send(caller.connection, number, reply)

    def read() -> None:
        with contextlib.suppress(EOFError, OSError, BrokenMessageError):
            while True:
                call = wire.receive(caller.connection)
                if workers.is_concurrent(call[1]):
                    threading.Thread(target=serve, args=call, daemon=True).start()
                else:
                    inbox.put(call)
        inbox.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (call := inbox.get()) is not None:
        serve(*call)
    workers.close()
