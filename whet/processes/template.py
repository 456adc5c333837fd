# SPDX-License-Identifier: Apache-2.0
"""The template process: loads the modules of its children once, and forks a child on each request.

    owner ── template ── guard ── child ── processes that the child starts
                      └─ guard ── child

The owner is the process that has a `ForkServer`. A guard outlives its child and reports its exit code. Orphaned
processes become children of the guard (a "subreaper"), so it can kill all of them, even those that left the child's
process group. A child ends with its guard, a guard with the template, and the template with its owner, even after kill
-9. All stay in the owner's session: under load the kernel divides the cores between sessions first, and calls between
two sessions took five times as long.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from whet.errors import WhetError
from whet.processes import frames

E = TypeVar("E", bound=WhetError)
PLAIN = (type(None), bool, int, float, str, list, tuple, dict)
REQUEST = struct.Struct("<Q")  # the number of a child: with a descriptor a request to fork it, without one to end it
REPORT = struct.Struct("<Qi")  # the number of a child that ended, and its exit code, or minus the signal
CHECK_SECONDS = 0.5  # how often the template checks whether its owner and its guards live
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
NAMED = "whet "  # before the name of a process in `ps` and `top`
NOT_FORKED = 71  # exit code for a child that could not be forked
ORPHANED = 256  # not a real exit code: the kernel killed the child because its guard had been killed
HIGH_DESCRIPTORS = 64  # distance of a child's connection to the limit of open files

# The program of a template, with two descriptors as its arguments. sys.path must be the owner's before whet is
# imported. -P: keeps the working folder off the path, where a pickle.py may hide that of the standard library.
PROGRAM = (
    "-Puc",
    "import os, pickle, sys; args = pickle.load(os.fdopen(int(sys.argv[2]), 'rb')); sys.path[:] = args[0]; "
    "from whet.processes.template import main; main(int(sys.argv[1]), *args[1:])",
)


class Caller:
    """The child's end of its connection to the owner. A forked copy of the child has no connection."""

    def __init__(self, connection: socket.socket) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        lowest = max(3, (files if 0 < files < 1024 else 1024) - HIGH_DESCRIPTORS)  # other code may close low numbers
        with connection:
            self.connection = socket.socket(fileno=fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, lowest))
        os.register_at_fork(after_in_child=self.connection.close)
        self._pid = os.getpid()

    def receive(self) -> tuple[int, bytes]:
        """Waits for the owner's next message.  Raises: EOFError after the last one; BrokenMessageError; OSError."""
        number, (content,) = frames.receive(self.connection, lambda size: memoryview(bytearray(size)))
        return number, bytes(content)

    def send(self, number: int, content: bytes) -> None:
        """Sends a reply to the owner. A forked copy exits here.  Raises: OSError."""
        self.end_copy()
        frames.send(self.connection, number, [content])

    def end_copy(self) -> None:
        """Exits if this process is a forked copy of the child."""
        if os.getpid() != self._pid:
            os._exit(0)


Serve = Callable[[Caller], None]


def sendable(kind: type[E], error: WhetError) -> E:
    """Returns an error of `kind` with the fields of `error` as plain values, which every process can unpickle."""

    def plain(each: WhetError) -> E:
        found = each.found if type(each.found) in PLAIN else str(each.found)
        return kind(each.key, found, each.expected, each.change)

    return kind.joined(map(plain, (error, *error.others)))


async def serve_tasks(caller: Caller, reply: Callable[[int, bytes], Coroutine[Any, Any, None]]) -> None:
    """Runs `reply` in its own task for each call, until the caller closes the connection."""
    import asyncio

    loop, tasks = asyncio.get_running_loop(), set[Any]()
    ended = loop.create_future()

    def read() -> None:
        try:
            task = loop.create_task(reply(*caller.receive()))
        except (EOFError, OSError, frames.BrokenMessageError):
            loop.remove_reader(caller.connection)
            ended.set_result(None)
            return
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_reader(caller.connection, read)
    await ended


def main(control: int, owner: int, target: str, argument: bytes, name: str) -> None:
    """Main function of the template and, after the fork, of each child: serves the caller, then exits normally.

    After a failure the process exits at once: a normal exit would close the connection long before the process ends."""
    name_process(name)  # guards and children inherit it
    module, _, function = target.partition(":")
    del sys.argv[1:]
    with socket.socket(fileno=control) as channel:
        os.set_inheritable(control, False)
        serve: Serve = vars(importlib.import_module(module))[function](argument)
        gc.collect()
        gc.freeze()  # so that collections in children leave the pages shared
        connection = _fork_on_request(channel, owner)
    caller = Caller(connection)
    try:
        with suppress(EOFError, ConnectionError):
            serve(caller)
        caller.end_copy()
    except BaseException:
        caller.end_copy()
        traceback.print_exc()
        os._exit(1)


def short_name(name: str) -> str:
    """Shortens a process's name so that it fits, after "whet ", into the kernel's 15 bytes; a rank keeps its number."""
    pool, _, rank = name.rpartition(" ")
    room = 15 - len(NAMED)
    return f"{pool[: room - len(rank) - 1]} {rank}" if pool and rank.isdecimal() else name[:room]


def name_process(name: str) -> None:
    """Names this process in `ps` and `top`."""
    _prctl(PR_SET_NAME, f"{NAMED}{short_name(name)}".encode())


def _fork_on_request(control: socket.socket, owner: int) -> socket.socket:
    """Serves requests of the owner until the owner ends.  Returns only in children."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    template, guards = os.getpid(), dict[int, int]()  # their process ids, by number
    while os.getppid() == owner:
        if select.select([control], [], [], CHECK_SECONDS)[0]:
            packet, descriptors, _, _ = socket.recv_fds(control, REQUEST.size, 1)
            if not packet:
                break
            (number,) = REQUEST.unpack(packet)
            for descriptor in descriptors:
                try:
                    guards[number] = os.fork()
                except OSError:
                    _report(control, number, NOT_FORKED)
                if guards.get(number) == 0:
                    return _guard(number, socket.socket(fileno=descriptor), control, template)
                os.close(descriptor)
            if not descriptors and number in guards:
                os.kill(guards[number], signal.SIGTERM)
        for number, pid in list(guards.items()):
            if (ended := os.waitpid(pid, os.WNOHANG))[0]:
                del guards[number]
                if ended[1]:  # it was killed: it reported nothing, and its orphans became children of the template
                    _report(control, number, ORPHANED)
                    _end_children(spared=guards.values())
    for pid in guards.values():
        os.kill(pid, signal.SIGTERM)
    for pid in guards.values():
        os.waitpid(pid, 0)
    _end_children()
    os._exit(0)


def _guard(number: int, connection: socket.socket, control: socket.socket, template: int) -> socket.socket:
    """Forks the child, reports its exit code, and kills processes that it left behind.  Returns in the child only."""
    os.setpgrp()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _signal_on_death_of(template, signal.SIGTERM)
    watched = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    guard = os.getpid()
    try:
        child = os.fork()
    except OSError:
        _report(control, number, NOT_FORKED)
        os._exit(0)
    if child == 0:
        control.close()
        os.setpgrp()
        _signal_on_death_of(guard, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        return connection
    connection.close()
    code = None
    while code is None:
        if signal.sigwait(watched) == signal.SIGTERM:
            os.kill(child, signal.SIGKILL)  # before the report: the owner then closes the connection
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    code = os.waitstatus_to_exitcode(ended[1])
    if os.getppid() == template:
        _report(control, number, code)
    _end_children()
    os._exit(0)


def _report(control: socket.socket, number: int, code: int) -> None:
    with suppress(OSError):  # the owner has ended
        control.send(REPORT.pack(number, code))


def _signal_on_death_of(parent: int, number: signal.Signals) -> None:
    """Asks the kernel for a signal to this process when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def _end_children(spared: Collection[int] = ()) -> None:
    """Kills the children of this process except `spared`, and then their children, which this process inherits."""
    while children := [pid for pid in _children() if pid not in spared]:
        for pid in children:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def _children() -> list[int]:
    own = os.getpid()
    with suppress(FileNotFoundError):  # on kernels without this file
        return [int(pid) for pid in Path(f"/proc/{own}/task/{own}/children").read_text().split()]
    return [int(each.name) for each in Path("/proc").glob("[0-9]*") if _parent(each) == own]


def _parent(process: Path) -> int | None:
    with suppress(OSError):
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return None


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
