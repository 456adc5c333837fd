# SPDX-License-Identifier: Apache-2.0
"""Sandboxes by name, one of each in a process."""

from __future__ import annotations

import json
from functools import cache

from whet.errors import SandboxError
from whet.sandbox.protocol import Language, Sandbox


@cache
def open_sandbox(name: str, python: str | None = None, languages: str = "{}", paths: tuple[str, ...] = ()) -> Sandbox:
    """The sandbox `bubblewrap`, `unisolated`, or a service at http://HOST:PORT.

    `python` is the interpreter of programs on this machine; `languages` further ones as JSON:
    `{"lua": {"file": "a.lua", "run": ["lua", "a.lua"]}}`; `paths` are folders of toolchains on this machine.
    Raises: SandboxError where it cannot hold programs."""
    if name.startswith(("http://", "https://")):
        from whet.sandbox.http import HttpSandbox

        if python or paths:
            found = f"set to files of this machine, and the sandbox {name} is a service"
            change = "unset them, and start the service with them (`whet serve-sandbox --python FILE --path FOLDER`)"
            raise SandboxError("python, paths", found, "neither", change)
        return HttpSandbox(name, _read(languages))
    from whet.sandbox.local import LocalSandbox, check

    if name not in ("bubblewrap", "unisolated"):
        unisolated = "unisolated, which has no namespaces, and holds programs by Landlock where the kernel has it"
        raise SandboxError("sandbox", name, f"bubblewrap, http://HOST:PORT of a SandboxFusion service, or {unisolated}")
    sandbox = LocalSandbox(isolated=name == "bubblewrap", python=python, languages=_read(languages), paths=paths)
    check(sandbox)
    return sandbox


def _read(text: str) -> dict[str, Language]:
    found = {}
    for name, given in json.loads(text).items():
        try:
            found[name] = Language(**given)
        except TypeError as error:
            expected = "file, run, and compile with compiled where it is compiled"
            raise SandboxError(f"languages.{name}", given, expected) from error
    return found
