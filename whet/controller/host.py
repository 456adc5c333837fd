# SPDX-License-Identifier: Apache-2.0
"""A worker process on this machine: it serves calls in order, until its caller has no more or is gone.

Two threads: one reads, so that the caller can hand over the next call at any time; the main one runs the workers and
answers. A call of a method that runs beside others has a thread of its own. torch is loaded in each worker, not in the
template that it is forked from.
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

    from whet.controller import wire
    from whet.controller.hosted import Hosted

    workers = Hosted(pickle.loads(caller.receive()[1]))
    inbox: Inbox = queue.SimpleQueue()
    sending = threading.Lock()

    def serve(number: int, call: list[Frame]) -> None:
        answer = workers.answer(call)
        with sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody waits for it any more
            caller.end_copy()
            send(caller.connection, number, answer)

    def read() -> None:
        with contextlib.suppress(EOFError, OSError, BrokenMessageError):
            while True:
                call = wire.receive(caller.connection)
                if workers.runs_beside(call[1]):
                    threading.Thread(target=serve, args=call, daemon=True).start()
                else:
                    inbox.put(call)
        inbox.put(None)

    threading.Thread(target=read, daemon=True).start()
    while (call := inbox.get()) is not None:
        serve(*call)
    workers.close()
