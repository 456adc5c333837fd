# SPDX-License-Identifier: Apache-2.0
"""The contract of sandboxes: untrusted programs, the limits of a run, and its result. `open_sandbox` opens a sandbox by
name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, Protocol

from whet.errors import SandboxError
from whet.manifests import missing_plugin
from whet.registry import SANDBOXES

End = Literal["ok", "failed", "compile", "timeout", "memory", "output", "processes", "disk"]


@dataclass(frozen=True)
class Limits:
    """The limits of one run of a program, including all processes that it starts."""

    seconds: float = 10.0  # wall-clock time
    cpu_seconds: float = 10.0  # for each process
    memory_bytes: int = 512 * 2**20  # for each process; also for all processes and the scratch folder together
    output_bytes: int = 2**20  # standard output and error together
    processes: int = 32  # threads count as processes
    open_files: int = 64
    file_bytes: int = 16 * 2**20  # for each file
    scratch_bytes: int = 64 * 2**20
    scratch_files: int = 4096


FORMS = (
    "bubblewrap, http://HOST:PORT of a SandboxFusion service, path/file.py:my_sandbox, or unisolated, which has no "
    "namespaces, and holds programs by Landlock where the kernel has it"
)
COMPILING = Limits(seconds=30.0, cpu_seconds=30.0, memory_bytes=2**30, file_bytes=64 * 2**20, scratch_bytes=128 * 2**20)


@dataclass(frozen=True)
class Job:
    """A job to run: a command line `argv`, or Python `code` for an interpreter that has common modules loaded."""

    argv: Sequence[str] = ()
    code: str = ""
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)  # by path in the scratch folder
    collect: Sequence[str] = ()  # names of files in the scratch folder to return
    limits: Limits = Limits()


@dataclass(frozen=True)
class Ran:
    """The result of a run. `end` is "ok" for exit code 0, "failed" for another code, "compile" if the program does not
    compile, else the limit that ended the run."""

    end: End
    code: int  # exit code; for a killed program minus the number of the signal
    stdout: bytes
    stderr: bytes
    seconds: float
    cpu_seconds: float = 0.0
    files: Mapping[str, bytes] = field(default_factory=dict)


def until_late(run: Callable[[bytes], Ran], inputs: Sequence[bytes]) -> list[Ran]:
    """Runs a program for each input. After a timeout it is not run again: the remaining inputs get the same result."""
    runs: list[Ran] = []
    for given in inputs:
        runs.append(runs[-1] if runs and runs[-1].end == "timeout" else run(given))
    return runs


@dataclass(frozen=True)
class Language:
    """A programming language: the file name of a source, and the commands that compile it and run it."""

    file: str
    run: Sequence[str]
    compile: Sequence[str] = ()
    compiled: str = ""  # the file that the compiler writes


@dataclass(frozen=True)
class Program:
    """A program in one of the sandbox's `languages`, with its limits and files."""

    language: str
    source: str
    limits: Limits = Limits()
    compiling: Limits = COMPILING
    files: Mapping[str, bytes] = field(default_factory=dict)
    collect: Sequence[str] = ()
    command: Language | None = None  # replaces the commands of the sandbox's `languages`


class Sandbox(Protocol):
    """Runs programs; several threads may call."""

    @property
    def name(self) -> str:
        """The name of the sandbox: "bubblewrap", "unisolated", or an address."""

    @property
    def languages(self) -> Mapping[str, Language | str]:
        """The languages of programs; a service has its own names for them."""

    def run(self, program: Program, inputs: Sequence[bytes]) -> list[Ran]:
        """Compiles a program, and runs it once for each standard input.  Raises: SandboxError if the sandbox fails."""

    def close(self) -> None:
        """Ends the running programs."""


@cache
def open_sandbox(name: str, python: str | None = None, languages: str = "{}", paths: tuple[str, ...] = ()) -> Sandbox:
    """Opens the sandbox `bubblewrap`, `unisolated`, a service at http://HOST:PORT, or another registered one.

    `python` is the interpreter of programs on this machine; `languages` has further languages as JSON: `{"lua":
    {"file": "a.lua", "run": ["lua", "a.lua"]}}`; `paths` are folders of toolchains on this machine.  Raises:
    SandboxError if it cannot confine programs."""
    is_service = name.startswith(("http://", "https://"))
    is_known = name in SANDBOXES or ":" in name or missing_plugin("sandbox", name)
    if name == "service" or not is_known:
        raise SandboxError("sandbox", name, FORMS)
    entry = SANDBOXES["service" if is_service else name]
    given = {"python": python, "paths": paths, "languages": _read(languages)}
    options = entry.resolve_options({key: value for key, value in given.items() if value}, "sandbox")
    sandbox: Sandbox = entry.make({"address": name}, options)
    return sandbox


def _read(text: str) -> dict[str, Language]:
    found = {}
    for name, given in json.loads(text).items():
        try:
            found[name] = Language(**given)
        except TypeError as error:
            expected = "the fields file and run; for a compiled language also compile and compiled"
            raise SandboxError(f"languages.{name}", given, expected) from error
    return found
