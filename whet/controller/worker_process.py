# SPDX-License-Identifier: Apache-2.0
"""Main function of a worker process on this machine: serves calls in order until its caller closes the connection.

A reader thread takes the next call from the socket at any time; the main thread runs the workers and replies. A call of
a concurrent method has a thread of its own. torch is loaded once, in the template, which asks for no device.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import queue
import socket
import threading
from functools import partial
from multiprocessing import process, spawn
from typing import Any

from whet.processes.frames import BrokenMessageError, Frame, send
from whet.processes.template import Caller, Serve, name_process

PUT_MAIN = 'put `if __name__ == "__main__":` around the statements of the script'
SOCKET_BYTES = 1 << 20  # buffered by the kernel: 1.6 times the throughput of Linux's default
Inbox = queue.SimpleQueue[tuple[int, list[Frame]] | None]


def main_module() -> dict[str, Any]:
    """Describes the launching program's main module, for workers to import.  Raises: RuntimeError in a worker."""
    data = spawn.get_preparation_data("")
    return {name: value for name, value in data.items() if name in ("dir", "sys_argv") or name.startswith("init_main")}


def prepare(main: bytes) -> Serve:
    """Returns the main function of a worker process, with torch loaded for all."""
    importlib.import_module("whet.controller.local_workers")
    return partial(_serve, pickle.loads(main))


def _serve(main: dict[str, Any], caller: Caller) -> None:
    caller.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
    vars(process.current_process())["_inheriting"] = True  # so that a launch in the main module is an error
    spawn.prepare(main)
    del vars(process.current_process())["_inheriting"]

    from whet.controller import wire
    from whet.controller.local_workers import LocalWorkers, RankSpec

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
