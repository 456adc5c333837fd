# SPDX-License-Identifier: Apache-2.0
"""What a worker process does: it builds the workers of its rank and serves calls in order, until told or left alone.

Three threads: one reads, so that the caller can hand over the next call at any time; one watches whether the caller
lives; the main one runs the workers and answers.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from whet.controller import wire
from whet.controller.worker import Layout, Placement, Worker, WorkerSpec
from whet.controller.worker_group import describe
from whet.errors import WhetError, WorkerError

BUILD = "__init__"  # the method name of the calls that build a worker: their payload is its WorkerSpec
LOOPBACK = "127.0.0.1"
WATCH_SECONDS = 0.2

Inbox = queue.SimpleQueue[list[wire.Frame] | None]


@dataclass(frozen=True)
class Rendezvous:
    """What a worker process is told at its start."""

    rank: int
    world_size: int
    threads: int
    store_port: int  # of a TCPStore on the loopback address
    caller_pid: int
    deadline_seconds: float


def host(caller: socket.socket, rendezvous: Rendezvous) -> None:
    """The main function of a worker process.

    A message is a pickled (role, method) and the frames of its payload; the answer to it is (True, result) or
    (False, WhetError). A caller that closes its side of the connection has no more calls.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the caller decides
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_watch, args=(rendezvous.caller_pid,), daemon=True).start()
    threading.Thread(target=_read, args=(caller, inbox), daemon=True).start()
    torch.set_num_threads(rendezvous.threads)
    workers = _Workers(rendezvous)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody waits for the answer any more
        while (frames := inbox.get()) is not None:
            wire.send(caller, _answer(workers, frames, rendezvous.rank))
    workers.close()


def _watch(caller_pid: int) -> None:
    """Ends the process with its caller. The connection does not say enough: a process that the caller forked may hold
    it open, and the main thread may be in a collective that never ends."""
    while os.getppid() == caller_pid:
        time.sleep(WATCH_SECONDS)
    os._exit(1)


def _read(caller: socket.socket, inbox: Inbox) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(wire.receive(caller))
    inbox.put(None)


def _answer(workers: _Workers, frames: list[wire.Frame], rank: int) -> list[wire.Frame]:
    role, method = pickle.loads(frames[0])
    try:
        result = workers.serve(role, method, _decode(frames[1:]))
        return _encode(result)
    except (Exception, SystemExit) as error:
        return wire.encode((False, _portable(error, role, rank, method)))


def _decode(frames: list[wire.Frame]) -> Any:
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


def _portable(error: BaseException, role: str, rank: int, method: str) -> WhetError:
    """The described error with its traceback as a note, in a form that the caller can unpickle."""
    trace = f"in the worker process:\n{''.join(traceback.format_exception(error)).rstrip()}"
    described = describe(error, role, rank, method)
    described.add_note(trace)
    try:
        pickle.loads(pickle.dumps(described))
    except Exception:  # an error class of a user's own whose constructor takes more than a message
        described = WorkerError(f"{role} rank {rank}: {method} raised {type(error).__name__}: {error}")
        described.add_note(trace)
    return described


class _Workers:
    """The workers of this process."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._by_role: dict[str, Worker] = {}

    def serve(self, role: str, method: str, payload: Any) -> Any:
        if method == BUILD:
            return self._build(payload)
        return getattr(self._by_role[role], method)(*payload.args, **payload.kwargs)

    def close(self) -> None:
        while self._by_role:  # the last one built first: it may use the others
            self._by_role.popitem()[1].close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _build(self, spec: WorkerSpec) -> Layout:
        if not torch.distributed.is_initialized():
            _join(self._rendezvous)
        self._by_role[spec.role] = spec.build(
            Placement(
                role=spec.role,
                rank=self._rendezvous.rank,
                world_size=self._rendezvous.world_size,
                process_group=torch.distributed.group.WORLD,
                neighbours=self._by_role,
            )
        )
        return Layout.of(self._by_role[spec.role])


def _join(rendezvous: Rendezvous) -> None:
    """Waits for the other ranks and makes the process group."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # unset, gloo asks what address the host's name has
    timeout = timedelta(seconds=rendezvous.deadline_seconds)
    torch.distributed.init_process_group(
        "gloo",
        store=TCPStore(LOOPBACK, rendezvous.store_port, is_master=False, timeout=timeout),
        rank=rendezvous.rank,
        world_size=rendezvous.world_size,
        timeout=timeout,
    )
