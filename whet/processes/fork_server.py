# SPDX-License-Identifier: Apache-2.0
"""The owner's side of a template process, which forks children on demand."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TypeVar

from whet.processes.template import NOT_FORKED, ORPHANED, PROGRAM, REPORT, REQUEST

CONTROL_SECONDS = 30  # limit of the wait for a template that is still loading to read a request
CLOSE_SECONDS = 5.0  # for all children to end


class Child:
    """A child process, and the owner's end of the connection to it."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number, self.connection = number, connection
        self.exit_code: int | None = None  # minus the signal; None while it runs


C = TypeVar("C", bound=Child)
REASONS = {
    -signal.SIGKILL: "SIGKILL (out of memory, or killed by hand)",
    ORPHANED: "the process that guards it was killed (by the code that it runs, out of memory, or by hand)",
    NOT_FORKED: "it could not be forked, or exit code 71 (too many processes of this user, or too little free memory)",
}


def exit_text(code: int) -> str:
    """Describes the exit code of a process that whet did not kill."""
    if code in REASONS:
        return REASONS[code]
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class ForkServer:
    """Starts child processes. `target`, as "package.module:function", returns the main function of the children.

    `target` is called once with `argument` in a new interpreter, the template; children share everything that it loads.
    Each child has its own process group, and its standard output is `stdout` (default: standard error). It ends with
    all processes that it started, at the latest when this process ends, even by kill -9. `ps` shows template and
    children as "whet NAME". Any thread may call; a forked copy of this process ends no child."""

    def __init__(self, target: str, argument: bytes = b"", *, stdout: int | None = 2, name: str = "child") -> None:
        self._target, self._argument, self._stdout, self._name = target, argument, stdout, name
        self._folder, self._owner = Path.cwd(), os.getpid()
        self._path = [each or str(self._folder) for each in sys.path]
        self._lock = threading.RLock()
        self._next = 1
        self._running: dict[int, Child] = {}
        self._ending: dict[int, Child] = {}  # killed ones that have not ended yet
        self._start()

    def fileno(self) -> int:
        """Returns the file descriptor that becomes readable when a child has ended."""
        return self._control.fileno()

    @property
    def is_ending(self) -> bool:
        """Tells whether children that were killed have not ended yet."""
        return bool(self._ending)

    def spawn(self, kind: type[C]) -> C:
        """Forks a child from the template process and returns it. If the template has died, starts a new one first."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            child = kind(self._next, ours)
            self._next += 1
            if self._template.poll() is not None:
                self._lose()
                self._control.close()
                self._start()
            self._running[child.number] = child
            self._control.settimeout(CONTROL_SECONDS)
            with contextlib.suppress(OSError):  # the template has just died: `read` reports the child as ended
                socket.send_fds(self._control, [REQUEST.pack(child.number)], [theirs.fileno()])
        return child

    def kill(self, child: Child) -> None:
        """Ends a child and all processes that it started, without waiting. Its exit code stays unset. `read` closes its
        connection only after it has ended: if the child saw the connection close, it would begin a normal exit, which
        is slow."""
        with self._lock, contextlib.suppress(OSError):
            if self._running.pop(child.number, None) is None:
                child.connection.close()
                return
            self._ending[child.number] = child
            self._control.settimeout(CONTROL_SECONDS)
            self._control.send(REQUEST.pack(child.number))

    def read(self, seconds: float = 0.0) -> list[Child]:
        """Returns the children that ended since the last call, except killed ones. Waits `seconds` for the first."""
        ended = []
        with self._lock, contextlib.suppress(OSError, struct.error):  # a timeout is an OSError
            self._control.settimeout(seconds)
            while packet := self._control.recv(REPORT.size):
                number, code = REPORT.unpack(packet)
                if (killed := self._ending.pop(number, None)) is not None:
                    killed.connection.close()
                if (child := self._running.pop(number, None)) is not None:
                    child.exit_code = code
                    ended.append(child)
                self._control.settimeout(0.0)
            ended += self._lose()
        return ended

    def wait(self, child: Child, seconds: float) -> bool:
        """Waits up to `seconds` until a child has ended by itself.  Returns True if it has ended."""
        until = time.monotonic() + seconds
        while child.exit_code is None and time.monotonic() < until:
            self.read(min(0.1, seconds))
        return child.exit_code is not None

    def close(self) -> None:
        """Ends the template and all children, and waits until they have ended."""
        if os.getpid() != self._owner:
            return
        with self._lock, contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._wait_for_template()
        self._close_ending()
        self._control.close()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, os.fdopen(os.memfd_create("whet"), "wb") as arguments:
            pickle.dump((self._path, self._owner, self._target, self._argument, self._name), arguments)
            arguments.seek(0)
            descriptors = [theirs.fileno(), arguments.fileno()]
            self._template = subprocess.Popen(
                [sys.executable, *PROGRAM, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=self._stdout,
                pass_fds=descriptors,
                cwd=self._folder,
                process_group=0,  # Ctrl-C reaches the owner only
            )

    def _lose(self) -> list[Child]:
        """Marks all children as ended, with the exit code of their template.  Returns them."""
        code, lost = self._wait_for_template(), list(self._running.values())
        self._close_ending()
        self._running.clear()
        for child in lost:
            child.exit_code = ORPHANED if code < 0 else code
        return lost

    def _close_ending(self) -> None:
        for child in self._ending.values():
            child.connection.close()
        self._ending.clear()

    def _wait_for_template(self) -> int:
        """Waits for the end of the template, and kills it if that takes too long.  Returns its exit code."""
        try:
            return self._template.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._template.kill()
            return self._template.wait()
