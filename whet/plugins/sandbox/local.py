# SPDX-License-Identifier: Apache-2.0
"""Sandboxes on this machine. A zygote process starts the programs: inside bubblewrap, each program in its own
namespaces; or without namespaces, confined by Landlock if the kernel has it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from whet.errors import SandboxError
from whet.plugins.sandbox.inside import whet_landlock
from whet.plugins.sandbox.inside.whet_zygote import LENGTH, SCRATCH, receive
from whet.programs.inside import whet_peer
from whet.programs.protocol import Job, Language, Limits, Program, Ran, until_late
from whet.registry import register_sandbox

log = logging.getLogger(__name__)
INSIDE = {  # folders of code that runs inside, by their places there
    "/opt/whet": Path(__file__).parent / "inside",
    "/opt/whet_tester": Path(whet_peer.__file__).parent,
}
END_SECONDS = 1.0  # for a process whose programs are lost
GRACE_SECONDS = 20.0  # for a busy machine, beyond a program's own limit
LINKS = ("bin", "lib", "lib64", "sbin")  # at the root, where the distribution has them as links into /usr
OWN = ("/", SCRATCH, "/proc", "/dev")  # folders that each program has for itself
CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_KILL")  # for new namespaces; no program gets them
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": SCRATCH,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the same verdict each time
    "PYTHONDONTWRITEBYTECODE": "1",
}
LANGUAGES = {
    "python": Language("solution.py", ["python"]),
    "cpp": Language(
        "solution.cpp", ["./solution"], ["g++", "-O2", "-std=c++17", "-o", "solution", "solution.cpp"], "solution"
    ),
    "c": Language("solution.c", ["./solution"], ["gcc", "-O2", "-o", "solution", "solution.c", "-lm"], "solution"),
    "javascript": Language("solution.js", ["node", "solution.js"]),
    "bash": Language("solution.sh", ["bash", "solution.sh"]),
}
INSTALL = (
    "install bubblewrap (`apt-get install bubblewrap`), use a service (sandbox=http://HOST:PORT), or accept programs "
    "without namespaces, held by Landlock alone where the kernel has it (sandbox=unisolated)"
)


class LocalSandbox:
    """Runs programs on this machine. The first job starts a zygote process, which forks the programs, and which ends
    with this object or with this process.

    Isolated programs see the system's libraries and compilers (/usr), the Python interpreter `python`, the folders
    `paths`, and an empty scratch folder; no network, no other process. With `isolated=False` they run as nobody if this
    user is root, and with Landlock they read only these files and write only the scratch folder. Commands are also
    found in each folder of `paths` and in its `bin`.  Raises: SandboxError for a path that is not a folder."""

    def __init__(
        self,
        *,
        isolated: bool = True,
        python: str | None = None,
        paths: Sequence[str] = (),
        languages: Mapping[str, Language] | None = None,
    ) -> None:
        self.languages = {**LANGUAGES, **(languages or {})}
        self._isolated, self._paths = isolated, [*paths]
        for path in paths:
            if not Path(path).is_absolute() or not Path(path).is_dir() or str(Path(*Path(path).parts[:2])) in OWN:
                own = f"not in {SCRATCH}, /proc or /dev, of which programs have their own"
                raise SandboxError("paths", path, f"the absolute path of an existing folder, {own}", "correct it")
        commands = [ENVIRONMENT["PATH"], *(each for path in paths for each in (f"{path}/bin", path))]
        self._environment = {**ENVIRONMENT, "PATH": ":".join(commands)}
        # A virtual environment is found by the path of its interpreter, so links stay.
        self.python = [os.path.realpath(sys.executable), "-I", "-S"] if python is None else [python, "-I"]
        self._prefixes = [sys.base_prefix] if python is None else _prefixes(python)
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._end: Any = None
        self._process: subprocess.Popen[bytes]

    @property
    def name(self) -> str:
        """The kind of isolation, as a name."""
        return "bubblewrap" if self._isolated else "unisolated"

    def run(self, program: Program, inputs: Sequence[bytes]) -> list[Ran]:
        """Compiles a program and runs it once for each standard input.  Raises: SandboxError."""
        language = program.command or self.languages[program.language]
        if program.language == "python":  # in the interpreter that is there
            job = Job(code=program.source, files=program.files, collect=program.collect, limits=program.limits)
            return until_late(lambda given: self.run_job(replace(job, stdin=given)), inputs)
        files = {**program.files, language.file: program.source.encode(errors="replace")}
        if language.compile:
            compiling = Job(language.compile, files=files, collect=[language.compiled], limits=program.compiling)
            made = self._run(compiling, program.language)
            if made.end != "ok" or language.compiled not in made.files:
                return [replace(made, end="compile", files={})] * len(inputs)
            files = {**program.files, language.compiled: made.files[language.compiled]}
        job = Job(language.run, files=files, collect=program.collect, limits=program.limits)
        return until_late(lambda given: self._run(replace(job, stdin=given), program.language), inputs)

    def _run(self, job: Job, language: str) -> Ran:
        """Runs a job.  Raises: SandboxError if the command is missing or cannot start."""
        ran = self.run_job(job)
        if ran.code == 127 and not job.argv[0].startswith("./"):  # a program may end so too; an empty one does not
            empty = self.run_job(replace(job, files=dict.fromkeys(job.files, b""), stdin=b""))
            if empty.code == 127:
                said = empty.stderr.decode(errors="replace").strip()[-200:]
                found = f"{job.argv[0]} does not start in the sandbox {self.name} ({said})"
                change = "install it, name its folder in paths, or leave rows of that language out"
                raise SandboxError(f"language {language}", found, f"it in {self._environment['PATH']}", change)
        return ran

    def run_job(self, job: Job) -> Ran:
        """Runs a command or Python code to its end.  Raises: SandboxError."""
        for name in (*job.files, *job.collect):
            if name.startswith("/") or not {"", ".."}.isdisjoint(name.split("/")) or "\0" in name:
                raise SandboxError("file", name, "a relative path below the scratch folder, without '..'")
        for _ in range(2):  # a process that died is replaced
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    self._send(theirs)
                ours.settimeout(job.limits.seconds + GRACE_SECONDS)
                try:
                    return self._exchange(ours, job)
                except TimeoutError as error:
                    self.close()
                    found = f"no answer {GRACE_SECONDS:g} s after the limit of its program"
                    change = "run fewer programs at a time; the sandbox was ended, and the next program starts it again"
                    raise SandboxError(f"sandbox {self.name}", found, change=change) from error
                except (OSError, EOFError) as error:
                    why = f"{error}"
                    with suppress(subprocess.TimeoutExpired):  # the fork alone died, or the whole process did
                        self._process.wait(END_SECONDS)
        raise SandboxError(f"sandbox {self.name}", f"ended: {self._log() or why}", change=INSTALL)

    def close(self) -> None:
        """Ends the zygote process and its programs."""
        with self._lock:
            if self._end is not None:
                self._end()
            self._control = None

    def _exchange(self, channel: socket.socket, job: Job) -> Ran:
        wanted = {"argv": [*job.argv], "code": job.code, "files": [*job.files], "collect": [*job.collect]}
        header = {**wanted, "limits": asdict(job.limits), "environment": self._environment}
        for blob in (json.dumps(header).encode(), *job.files.values(), job.stdin):
            channel.sendall(LENGTH.pack(len(blob)))
            channel.sendall(blob)
        answer = json.loads(receive(channel))
        out, errors, *files = [receive(channel) for _ in range(2 + len(answer["files"]))]
        if answer["end"] == "sandbox":
            why = f"cannot start a program: {answer['message']}"
            raise SandboxError(f"sandbox {self.name}", why, change=INSTALL)
        found = dict(zip(answer["files"], files, strict=True))
        return Ran(answer["end"], answer["code"], out, errors, answer["seconds"], answer["cpu_seconds"], found)

    def _send(self, channel: socket.socket) -> None:
        with self._lock:
            if self._control is None or self._process.poll() is not None:
                if self._end is not None:
                    self._end()
                self._control = self._start()
            with suppress(OSError):  # it has just died: the channel tells
                socket.send_fds(self._control, [b"j"], [channel.fileno()])

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        folders = [place if self._isolated else str(folder) for place, folder in INSIDE.items()]
        command = [*self.python, f"{folders[0]}/whet_zygote.py", ":".join(folders), str(theirs.fileno())]
        wrapper = self._wrapper() if self._isolated else []
        if not self._isolated and not whet_landlock.version():
            log.warning(
                "Landlock (Linux 5.13) is missing in this kernel: programs have the rights of this user, or "
                "of nobody if this user is root; install bubblewrap, or use a service (sandbox=http://HOST:PORT)"
            )
        command += ["isolated"] if self._isolated else ["unisolated", *self._readable()]
        with theirs, tempfile.TemporaryFile() as said:
            process = subprocess.Popen(
                [*wrapper, *command],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=ENVIRONMENT,
            )
            self._errors = os.dup(said.fileno())
        self._process = process
        self._end = weakref.finalize(self, _end, process, ours, self._errors)
        return ours

    def _wrapper(self) -> list[str]:
        """Returns the command line of bubblewrap."""
        found = shutil.which("bwrap")
        if found is None:
            found = "not installed, and programs must not run without isolation"
            raise SandboxError("sandbox=bubblewrap", found, "the command bwrap in PATH", INSTALL)
        words = [found, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        if os.getuid() != 0:  # root needs no namespace of users, and can then give programs another user
            words += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
        words += ["--new-session", "--clearenv", "--cap-drop", "ALL"]
        words += [word for name in CAPABILITIES for word in ("--cap-add", name)]
        for name in LINKS:
            link = Path("/", name)
            if link.is_symlink():
                words += ["--symlink", str(link.readlink()), str(link)]
            elif link.is_dir():
                words += ["--ro-bind", str(link), str(link)]
        shown = self._readable()
        above = sorted({str(parent) for path in [*shown, *INSIDE] for parent in Path(path).parents} - {"/"})
        for parent in above:  # bubblewrap makes them for the owner alone
            words += ["--perms", "0755", "--dir", parent]
        for place, path in {**{path: path for path in shown}, **INSIDE}.items():
            words += ["--ro-bind", str(path), place]
        words += ["--proc", "/proc", "--dev", "/dev", "--dir", SCRATCH]
        return [*words, "--remount-ro", "/dev", "--remount-ro", "/"]

    def _readable(self) -> list[str]:
        """Returns the folders that programs may read."""
        toolchains = ["/etc/alternatives", *map(str, Path("/etc").glob("java-*-openjdk"))]  # what /usr has links to
        shown = ["/usr", *toolchains, *self._prefixes, *self._paths]
        own = [] if self._isolated else [f"/{name}" for name in LINKS if not Path("/", name).is_symlink()]
        return [path for path in dict.fromkeys([*shown, *own]) if Path(path).is_dir()]

    def _log(self) -> str:
        if self._end is None:
            return ""
        with suppress(OSError):
            text = os.pread(self._errors, 4096, 0).decode(errors="replace").strip()
            return text.splitlines()[-1] if text else ""
        return ""


@register_sandbox("bubblewrap")
def bubblewrap(
    *, python: str | None = None, paths: Sequence[str] = (), languages: Mapping[str, Language] | None = None
) -> LocalSandbox:
    """Returns a sandbox that isolates programs by bubblewrap: no network, other files or other processes."""
    return _checked(LocalSandbox(isolated=True, python=python, paths=paths, languages=languages))


@register_sandbox("unisolated")
def unisolated(
    *, python: str | None = None, paths: Sequence[str] = (), languages: Mapping[str, Language] | None = None
) -> LocalSandbox:
    """Returns a sandbox without namespaces: Landlock confines programs, if the kernel has it."""
    return _checked(LocalSandbox(isolated=False, python=python, paths=paths, languages=languages))


def _checked(sandbox: LocalSandbox) -> LocalSandbox:
    """Runs a test program, and returns the sandbox.  Raises: SandboxError if this machine cannot isolate programs."""
    ran = sandbox.run_job(Job(code="print(6 * 7)", limits=Limits(seconds=20.0)))
    if (ran.end, ran.stdout) != ("ok", b"42\n"):
        raise SandboxError(f"sandbox {sandbox.name}", f"a program that prints 42 ended with {ran}", change=INSTALL)
    return sandbox


def _prefixes(python: str) -> list[str]:
    """Returns the installation folders of an interpreter.  Raises: SandboxError."""
    code = "import sys; print(sys.prefix); print(sys.base_prefix)"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        expected = "a Python interpreter for the programs in the sandbox"
        raise SandboxError("python", f"{python} ({error})", expected, "name another") from error
    return [*dict.fromkeys(done.stdout.split())]


def _end(process: subprocess.Popen[bytes], control: socket.socket, log: int) -> None:
    """Closes the socket, so that the zygote ends itself and all programs, and waits for its end; kills it if late."""
    control.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_SECONDS)
    process.kill()
    process.wait()
    os.close(log)
