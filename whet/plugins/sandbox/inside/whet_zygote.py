# SPDX-License-Identifier: Apache-2.0
"""The process that starts programs, each in its own namespaces; nothing of whet is imported.

    python -I -S whet_zygote.py FOLDER:FOLDER DESCRIPTOR isolated|unisolated [READABLE ...]

It runs inside bubblewrap, has loaded common modules, and forks for every connection that it gets over the socket
DESCRIPTOR. The fork reads a job, starts the program, watches its limits, kills it with its children, and answers:

    zygote - supervisor - init (process 1 of the program's namespaces) - program and its children

A program gets new namespaces (user, process, mount, network, IPC, host name, cgroup), an empty scratch folder at /tmp
in memory with /dev/shm in it, another user id, no capabilities, a filter of system calls, and resource limits. /proc
has the program's own processes and nothing else, read-only; init, and whet_tester, are not dumpable, so that /proc does
not show them. Nothing else can be written. Its standard input is sent after the fork, so that no memory that the
program inherits has the input.

Unisolated, the program runs in a folder of its own, as nobody if this user is root, with the filter and the resource
limits. If the kernel has Landlock, the program reads only READABLE and writes only its folder (whet_landlock)."""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import resource
import select
import shutil
import signal
import socket
import stat
import struct
import sys
import tempfile
import time
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_PIDS, NEW_USERS, NEW_MOUNTS = 0x20000000, 0x10000000, 0x00020000
NEW_OTHERS = NEW_MOUNTS | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000  # mounts, network, IPC, host name, cgroup
NOBODY = 65534
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXECUTION, BIND = 1, 2, 4, 8, 4096  # of mount
DROP_CAPABILITIES, SUBREAPER, DUMPABLE = (0x20080522, 0), 36, 4
OWN_PROCESSES = "hidepid=ptraceable,subset=pid"  # of /proc: processes that this one may read, and no other files
PRELOADED = ["bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"]
PRELOADED += ["operator", "random", "re", "statistics", "string", "traceback", "typing", "whet_tester"]
SCRATCH = "/tmp"
TICK_SECONDS = 0.02
READ_BYTES = 1 << 16
LENGTH = struct.Struct("!Q")
PAGE = os.sysconf("SC_PAGE_SIZE")
KILLING_SIGNALS = {signal.SIGXCPU: "timeout", signal.SIGXFSZ: "disk"}


class SetupError(Exception):
    """Raised if a program could not be put into its sandbox."""


# -- the zygote


def serve(control: socket.socket, isolated: bool) -> None:
    """Forks a supervisor for each connection, until the other end closes the socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors need not be waited for
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    while True:
        try:
            message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        except OSError:
            return
        if not message:
            return
        if os.fork() == 0:
            code = 1
            try:
                control.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                supervise(socket.socket(fileno=descriptors[0]), isolated)
                code = 0
            finally:
                os._exit(code)
        os.close(descriptors[0])


# -- the supervisor


def supervise(channel: socket.socket, isolated: bool) -> None:
    """Runs one job and sends its result."""
    job = json.loads(receive(channel))
    files = {name: receive(channel) for name in job["files"]}
    answer: dict[str, Any]
    out, errors, found = b"", b"", dict[str, bytes]()
    try:
        program = RunningProgram(job, files, isolated)
    except (SetupError, OSError) as error:
        receive(channel)
        answer = {"end": "sandbox", "message": f"{error}"}
    else:
        try:
            answer = program.watch(receive(channel), channel)
            found = program.collect(job["collect"])
        finally:
            program.close()
        out, errors = bytes(program.output), bytes(program.errors)
    _send(channel, json.dumps({**answer, "files": list(found)}).encode())
    for blob in (out, errors, *found.values()):
        _send(channel, blob)


class RunningProgram:
    """A running program, its pipes and its scratch folder."""

    def __init__(self, job: dict[str, Any], files: dict[str, bytes], isolated: bool) -> None:
        self.limits, self.isolated = job["limits"], isolated
        self.output, self.errors = bytearray(), bytearray()
        self.folder = None if isolated else tempfile.mkdtemp(prefix="whet-unisolated-")
        if self.folder and os.getuid() == 0:
            os.chown(self.folder, NOBODY, NOBODY)
        ours, theirs = socket.socketpair()
        inputs, outputs, errors = os.pipe(), os.pipe(), os.pipe()
        self.started = self.next_look = time.monotonic()
        if isolated:
            _check(LIBC.unshare(NEW_PIDS), "a namespace of processes")
        else:
            _check(LIBC.prctl(SUBREAPER, 1, 0, 0, 0), "taking over orphans")
        for descriptor in (inputs[0], outputs[1], errors[1]):
            os.fchmod(descriptor, 0o666)  # the program, another user, may open /dev/stdin
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            try:
                init(job, files, theirs, (inputs[0], outputs[1], errors[1]), self.folder)
            except BaseException as error:
                theirs.sendall(b"!" + f"{type(error).__name__}: {error}".encode()[:500])
            finally:
                os._exit(1)
        theirs.close()
        for descriptor in (inputs[0], outputs[1], errors[1]):
            os.close(descriptor)
        self.input, self.readers = inputs[1], {outputs[0]: self.output, errors[0]: self.errors}
        self.state = ours
        if isolated:
            self._map_user()
        message, descriptors, _, _ = socket.recv_fds(ours, 600, 1)
        if not descriptors:
            self.close()
            raise SetupError(message[1:].decode() or "the program ended while it was prepared")
        self.scratch = descriptors[0]
        self.end_descriptor = os.pidfd_open(self.pid)

    def _map_user(self) -> None:
        """Maps one user into the program's user namespace: the user nobody if this user is root, else this user."""
        if self.state.recv(1) != b"u":
            raise SetupError("no user namespace; does user.max_user_namespaces allow one?")
        user, group = (NOBODY, NOBODY) if os.getuid() == 0 else (os.getuid(), os.getgid())
        settings = {"setgroups": "deny", "uid_map": f"{NOBODY} {user} 1", "gid_map": f"{NOBODY} {group} 1"}
        for name, text in settings.items():
            with open(f"/proc/{self.pid}/{name}", "w") as file:
                file.write(text)
        self.state.sendall(b"m")

    def watch(self, given: bytes, channel: socket.socket) -> dict[str, Any]:
        """Writes the program's input and reads its output, until it ends or exceeds a limit."""
        ends_by = self.started + self.limits["seconds"]
        poller, left = select.poll(), memoryview(given)
        for descriptor in (*self.readers, self.end_descriptor):
            os.set_blocking(descriptor, False)
            poller.register(descriptor, select.POLLIN)
        poller.register(channel, select.POLLHUP | select.POLLRDHUP)  # the other end has closed the connection
        os.set_blocking(self.input, False)
        if left:
            poller.register(self.input, select.POLLOUT)
        else:
            os.close(self.input)
        reason, is_over = None, False
        while reason is None and not is_over:
            now = time.monotonic()
            events = poller.poll(max(0, math.ceil(1000 * min(TICK_SECONDS, ends_by - now))))
            for descriptor, _ in events:
                if descriptor == self.end_descriptor:
                    is_over = True
                elif descriptor == channel.fileno():
                    reason = "abandoned"
                elif descriptor == self.input:
                    left = self._feed(left, poller)
                elif not self._read(descriptor):
                    poller.unregister(descriptor)
            reason = reason or self._over()
        seconds = time.monotonic() - self.started
        if is_over and reason is None:  # a last check, also of the files that it left behind
            self.next_look = now
            reason = self._over()
            while [each for each in self.readers if self._read(each)]:  # all who could write are gone
                reason = reason or self._over()
        self.kill()
        return {**self._verdict(reason), "seconds": seconds}

    def _verdict(self, reason: str | None) -> dict[str, Any]:
        try:
            self.state.setblocking(False)
            code = struct.unpack("!i", self.state.recv(4))[0]
        except (OSError, struct.error):
            code = -signal.SIGKILL
        if reason is None:
            reason = KILLING_SIGNALS.get(-code) or ("ok" if code == 0 else "failed")
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return {"end": reason, "code": code, "cpu_seconds": usage.ru_utime + usage.ru_stime}

    def _feed(self, left: memoryview, poller: select.poll) -> memoryview:
        try:
            left = left[os.write(self.input, left[:READ_BYTES]) :]
        except BlockingIOError:
            return left
        except OSError:  # it does not read
            left = left[:0]
        if not left:
            poller.unregister(self.input)
            os.close(self.input)
        return left

    def _read(self, descriptor: int) -> bool:
        """Reads from a pipe once. Returns False at the end of the stream."""
        buffer = self.readers[descriptor]
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        buffer += data
        return bool(data)

    def _over(self) -> str | None:
        """Returns the limit that the program exceeds, if any. Checks its processes only at intervals."""
        limits, now = self.limits, time.monotonic()
        if now - self.started > limits["seconds"]:
            return "timeout"
        if len(self.output) + len(self.errors) > limits["output_bytes"]:
            return "output"
        if now < self.next_look:
            return None
        self.next_look = now + TICK_SECONDS
        pids = descendants()
        if len(pids) > limits["processes"] + 1:
            return "processes"
        used = sum(map(resident, pids))
        if self.isolated:
            disk = os.fstatvfs(self.scratch)
            used += (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        return "memory" if used > limits["memory_bytes"] else None

    def kill(self) -> None:
        """Ends the program and all its children."""
        if self.isolated:  # with its first process a namespace ends
            _signal(self.pid)
        else:
            for pid in descendants():
                _signal(pid)
        try:
            while os.wait():
                for pid in descendants():
                    _signal(pid)
        except ChildProcessError:  # there are no more
            pass

    def close(self) -> None:
        """Ends the program and removes its folder."""
        self.kill()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def collect(self, names: list[str]) -> dict[str, bytes]:
        """Reads the named plain files that the program left in its scratch folder."""
        found = {}
        for name in names:
            try:
                descriptor = landlock.open_beneath(self.scratch, name)
            except OSError:
                continue
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                with open(descriptor, "rb") as file:
                    found[name] = file.read(self.limits["file_bytes"])
            else:
                os.close(descriptor)
        return found


def descendants() -> list[int]:
    """Returns the ids of all descendants of this process."""
    found = [os.getpid()]
    for each in found:
        try:
            for task in os.listdir(f"/proc/{each}/task"):
                with open(f"/proc/{each}/task/{task}/children") as file:
                    found += map(int, file.read().split())
        except OSError:  # it has ended
            continue
    return found[1:]


def resident(pid: int) -> int:
    """Returns the resident memory of a process, in bytes."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * PAGE
    except OSError:
        return 0


# -- the program's side


def init(
    job: dict[str, Any], files: dict[str, bytes], state: socket.socket, pipes: tuple[int, ...], folder: str | None
) -> None:
    """Runs as process 1 of the namespaces: prepares them, starts the program, and reports how it ended."""
    for each in (signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD):
        signal.signal(each, signal.SIG_DFL)
    os.setsid()
    if folder is None:
        _isolate(state, job["limits"])
    else:
        landlock.leave_root(READABLE)
        LIBC.prctl(DUMPABLE, 0, 0, 0, 0)
    os.chdir(folder or SCRATCH)
    for name, content in files.items():
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(name), exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)
        os.chmod(name, 0o755)  # it may be a compiled program
    files.clear()
    opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    program = os.fork()
    if program == 0:
        for descriptor, pipe in enumerate(pipes):
            os.dup2(pipe, descriptor)
        os.closerange(3, 1 << 16)
        _run(job, folder)
    socket.send_fds(state, [b"s"], [opened])
    os.closerange(0, state.fileno())
    os.closerange(state.fileno() + 1, 1 << 16)
    while True:
        ended, status = os.wait()
        if ended == program:
            state.sendall(struct.pack("!i", os.waitstatus_to_exitcode(status)))
            os._exit(0)


def _isolate(state: socket.socket, limits: dict[str, Any]) -> None:
    # Before the namespace of users, whose rights do not reach the namespace of processes.
    _check(LIBC.unshare(NEW_MOUNTS), "a namespace of mounts")
    _mount("proc", "/proc", READ_ONLY | NO_SUID | NO_DEVICES | NO_EXECUTION, OWN_PROCESSES)
    _check(LIBC.unshare(NEW_USERS | NEW_OTHERS), "new namespaces")
    state.sendall(b"u")
    if state.recv(1) != b"m":
        raise SetupError("the user of the namespace was not set")
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    LIBC.prctl(DUMPABLE, 0, 0, 0, 0)
    size = f"size={limits['scratch_bytes']},nr_inodes={limits['scratch_files'] + 2},mode=0755"
    _mount("tmpfs", SCRATCH, NO_SUID | NO_DEVICES, size)
    for name, place in (("shm", "/dev/shm"), ("tmp", SCRATCH)):  # one file system, whose limits count both
        os.mkdir(f"{SCRATCH}/{name}")
        _mount(f"{SCRATCH}/{name}", place, BIND)


def _mount(source: str, place: str, flags: int, options: str = "") -> None:
    """Mounts a folder, or a file system that `source` names by type."""
    call = (source.encode(), place.encode(), source.encode(), ctypes.c_ulong(flags), options.encode())
    _check(LIBC.mount(*call), f"a file system at {place}")


def _run(job: dict[str, Any], folder: str | None) -> None:
    """Turns this process into the program. Errors before its start go to its standard error."""
    try:
        limits = job["limits"]
        for kind, value in (
            (resource.RLIMIT_CPU, math.ceil(limits["cpu_seconds"])),
            (resource.RLIMIT_DATA, limits["memory_bytes"]),
            (resource.RLIMIT_FSIZE, limits["file_bytes"]),
            (resource.RLIMIT_NOFILE, limits["open_files"]),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            resource.setrlimit(kind, (value, value + (kind == resource.RLIMIT_CPU)))
        if folder is None:  # elsewhere all processes of the user would count
            resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"] + 1,) * 2)
            header, nothing = struct.pack("Ii", *DROP_CAPABILITIES), bytes(24)
            _check(LIBC.capset(header, nothing), "dropping capabilities")
        else:
            job["environment"] |= {"HOME": folder, "TMPDIR": folder}
            landlock.hold(READABLE, folder)
        LIBC.prctl(DUMPABLE, 1, 0, 0, 0)  # it may read /proc/self
        if FILTER:
            seccomp.install(FILTER)
        if job["argv"]:
            os.execvpe(job["argv"][0], job["argv"], job["environment"])
        os.environ.clear()
        os.environ.update(job["environment"])
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(127)
    _be_main(job["code"], folder or SCRATCH)


def _be_main(code: str, folder: str) -> None:
    """Runs Python code in this process like a script."""
    import builtins
    import traceback
    import types

    sys.argv, sys.path, tempfile.tempdir = ["solution.py"], [folder, *sys.path], None
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = open(descriptor, mode, encoding="utf-8", closefd=False, errors="surrogateescape")
        vars(sys).update({name: stream, f"__{name}__": stream})
    module = types.ModuleType("__main__")
    vars(module).update(__builtins__=builtins, __file__="solution.py")
    sys.modules["__main__"] = module
    status: Any = 0
    try:
        exec(compile(code, "solution.py", "exec", dont_inherit=True), vars(module))
    except SystemExit as error:
        status = error.code
        if status is not None and not isinstance(status, int):
            sys.stderr.write(f"{status}\n")
            status = 1
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # from the program's own line on
        traceback.print_exception(error)
        status = 1
    import atexit
    import threading

    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    os._exit((status or 0) & 0xFF)


# -- messages


def receive(channel: socket.socket) -> bytes:
    """Reads a message, which is its length followed by its bytes."""
    (size,) = LENGTH.unpack(_exactly(channel, LENGTH.size))
    return _exactly(channel, size)


def _exactly(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return bytes(data)


def _send(channel: socket.socket, blob: bytes) -> None:
    channel.sendall(LENGTH.pack(len(blob)) + blob)


def _check(result: int, what: str) -> None:
    if result:
        raise SetupError(f"{what}: {os.strerror(ctypes.get_errno())}")


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    own = sys.argv[1].split(":")
    sys.path[:0] = own
    isolated = sys.argv[3] == "isolated"
    READABLE = [*own, *sys.argv[4:]]
    seccomp: Any = importlib.import_module("whet_seccomp")
    landlock: Any = importlib.import_module("whet_landlock")
    FILTER = seccomp.program(isolated=isolated) if isolated or os.uname().machine in seccomp.ARCHITECTURES else b""
    for name in PRELOADED:
        importlib.import_module(name)
    serve(socket.socket(fileno=int(sys.argv[2])), isolated)
