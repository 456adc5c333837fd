# SPDX-License-Identifier: Apache-2.0
"""What a worker process on this machine does: it serves calls in order, until told or left alone.

Three threads: one reads, so that the caller can hand over the next call at any time; one watches whether the caller
lives; the main one runs the workers and answers.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import threading
import time

from whet.controller import wire
from whet.controller.hosted import Hosted, Seat

WATCH_SECONDS = 0.2

Inbox = queue.SimpleQueue[list[wire.Frame] | None]


def host(caller: socket.socket, seat: Seat, caller_pid: int) -> None:
    """The main function of a worker process. A caller that closes its side of the connection has no more calls."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the caller decides
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_watch, args=(caller_pid,), daemon=True).start()
    threading.Thread(target=_read, args=(caller, inbox), daemon=True).start()
    workers = Hosted(seat)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # nobody waits for the answer any more
        while (frames := inbox.get()) is not None:
            wire.send(caller, workers.answer(frames))
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
