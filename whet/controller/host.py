# SPDX-License-Identifier: Apache-2.0
"""A worker process on this machine: it serves calls in order, until its caller has no more or is gone.

Two threads: one reads, so that the caller can hand over the next call at any time; the main one runs the workers and
answers. torch is loaded in each worker, not in the template that it is forked from.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import socket
import threading
from functools import partial
from multiprocessing import process, spawn
from typing import Any

from whet.processes.frames import BrokenMessageError, Frame, send
from whet.processes.template import Caller, Serve

SOCKET_BYTES = 1 << 20  # buffered by the kernel: 1.6 times the throughput of Linux's default
Inbox = queue.SimpleQueue[tuple[int, list[Frame]] | None]


def main_module() -> dict[str, Any]:
    """The program that launches workers, as they load it.  Raises: RuntimeError in a worker that loads it."""
    given = spawn.get_preparation_data("")
    return {name: value for name, value in given.items() if name in ("dir", "sys_argv") or name.startswith("init_main")}


def prepare(main: bytes) -> Serve:
    """Returns the main function of a worker process."""
    return partial(_host, pickle.loads(main))


def _host(main: dict[str, Any], caller: Caller) -> None:
    caller.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    vars(process.current_process())["_inheriting"] = True  # so that a launch in the main module is an error
    spawn.prepare(main)
    del vars(process.current_process())["_inheriting"]

    from whet.controller.hosted import Hosted

    workers = Hosted(pickle.loads(caller.receive()[1]))
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_read, args=(caller.connection, inbox), daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody waits for the answer any more
        while (call := inbox.get()) is not None:
            answer = workers.answer(call[1])
            caller.end_copy()
            send(caller.connection, call[0], answer)
    workers.close()


def _read(caller: socket.socket, inbox: Inbox) -> None:
    from whet.controller import wire

    with contextlib.suppress(EOFError, OSError, BrokenMessageError):
        while True:
            inbox.put(wire.receive(caller))
    inbox.put(None)
