# SPDX-License-Identifier: Apache-2.0
"""A sandbox behind HTTP, with SandboxFusion's interface (bytedance/SandboxFusion): POST /run_code."""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import Any, get_args

from whet.errors import SandboxError
from whet.http import CallError, fetch, shown
from whet.limits import read_json
from whet.programs.protocol import End, Language, Program, Ran, until_late
from whet.registry import register_sandbox

ATTEMPTS = 4  # of a request, while the service is busy or does not answer
GRACE_SECONDS = 30.0  # for the service to answer with all attempts, beyond the limits of the program
SERVED = {name: name for name in ("python", "cpp", "bash", "java", "go", "rust")} | {"javascript": "nodejs"}
TOLD = "whet: "  # prefix of `message` from `whet serve-sandbox`; behind it how the program ended
KEY = "WHET_SANDBOX_KEY"  # environment variable of the API key of a service
MOST_BYTES = 256 * 2**20  # of an answer
INTERFACE = "a service with SandboxFusion's interface"


class HttpSandbox:
    """Runs programs in a service; the service's own limits hold too. `languages` adds languages with commands of the
    client, which only a `whet serve-sandbox` service can run; SandboxFusion has only its fixed list of languages."""

    def __init__(self, address: str, languages: Mapping[str, Language] | None = None) -> None:
        self.address = address.rstrip("/").removesuffix("/run_code")
        self._own = languages or {}

    @property
    def name(self) -> str:
        return shown(self.address)

    @cached_property
    def languages(self) -> Mapping[str, Language | str]:
        """The languages that a whet service reports, plus the client's own `languages`; for SandboxFusion, its fixed
        list.  Raises: SandboxError."""
        told = self._ask("/v1/languages", None, GRACE_SECONDS)
        if told is None and self._own:
            found = f"{', '.join(self._own)}, and the service at {self.name} accepts no languages from its clients"
            expected = "a service of `whet serve-sandbox`, or no languages"
            raise SandboxError("languages", found, expected, "unset reward.kwargs.languages")
        return SERVED if told is None else {**{name: name for name in told["languages"]}, **self._own}

    def run(self, program: Program, inputs: Sequence[bytes]) -> list[Ran]:
        limits, language = program.limits, self.languages[program.language]
        body = {
            "code": program.source,
            "language": language if isinstance(language, str) else program.language,
            "whet_language": None if isinstance(language, str) else asdict(language),
            "compile_timeout": program.compiling.seconds,
            "run_timeout": limits.seconds,
            "memory_limit_MB": limits.memory_bytes // 2**20,
            "files": {name: base64.b64encode(content).decode() for name, content in program.files.items()},
            "fetch_files": [*program.collect],
        }
        seconds = limits.seconds + program.compiling.seconds + GRACE_SECONDS

        def run(given: bytes) -> Ran:
            answer = self._ask("/run_code", {**body, "stdin": given.decode(errors="replace")}, seconds) or {}
            try:
                return self._read(answer)
            except (ValueError, TypeError, AttributeError) as error:
                raise self._unread(f"{answer!r:.200}: {error}") from error

        return until_late(run, inputs)

    def close(self) -> None:
        """Does nothing: the service keeps running."""

    def _ask(self, path: str, body: dict[str, Any] | None, seconds: float) -> dict[str, Any] | None:
        """Sends POST with a body, or GET without one.  Returns the reply; None if GET finds no such path."""
        secret, method = os.environ.get(KEY), "GET" if body is None else "POST"
        headers = {"Authorization": f"Bearer {secret}"} if secret else None
        limits: dict[str, Any] = {"seconds": seconds, "attempts": ATTEMPTS, "most": MOST_BYTES}
        try:
            parse = partial(read_json, most=MOST_BYTES)
            found = fetch(method, f"{self.address}{path}", parse, body=body, headers=headers, **limits)
        except CallError as error:
            if body is None and error.status in (404, 405, 501):
                return None
            why = f"{error}; set its key as the environment variable {KEY}" if error.status == 401 else f"{error}"
            change = "start it (`whet serve-sandbox`), or correct the address"
            raise SandboxError(f"sandbox at {self.name}", f"no result ({why})", INTERFACE, change) from error
        if not isinstance(found, dict):
            raise self._unread(f"{found!r:.200}")
        return found

    def _unread(self, answer: str) -> SandboxError:
        change = "correct the address"
        return SandboxError(f"sandbox at {self.name}", f"answered {answer}", f"a result of {INTERFACE}", change)

    def _read(self, answer: dict[str, Any]) -> Ran:
        """Converts a reply to the result of a program.  Raises: SandboxError if the service itself failed."""
        if answer.get("status") == "SandboxError":
            raise SandboxError(f"sandbox at {self.name}", f"failed: {answer.get('message')}", change="read its log")
        compiled, ran = answer.get("compile_result"), answer.get("run_result")
        result = ran or compiled
        if not isinstance(result, dict):
            raise self._unread(f"without run_result: {answer!r:.200}")
        code = result.get("return_code")
        end: End = "ok" if code == 0 else "failed"
        if result.get("status") == "TimeLimitExceeded":
            end = "timeout"
        told = str(answer.get("message") or "").removeprefix(TOLD)
        end = told if told in get_args(End) else "compile" if ran is None else end  # type: ignore[assignment]
        out, errors = ((result.get(name) or "").encode() for name in ("stdout", "stderr"))
        given, seconds = answer.get("files") or {}, float(result.get("execution_time") or 0.0)
        files = {name: base64.b64decode(content, validate=True) for name, content in given.items()}
        return Ran(end, -9 if code is None else int(code), out, errors, seconds, files=files)


@register_sandbox("service")
def service(
    address: str,
    *,
    python: str | None = None,
    paths: Sequence[str] = (),
    languages: Mapping[str, Language] | None = None,
) -> HttpSandbox:
    """Returns a sandbox that runs programs in the service at http://HOST:PORT.

    Raises: SandboxError if `python` or `paths` is set: the service has its own interpreters and folders."""
    if python or paths:
        found = f"set to files of this machine, and the sandbox {address} is a service"
        change = "unset them, and start the service with them (`whet serve-sandbox --python FILE --path FOLDER`)"
        raise SandboxError("python, paths", found, "neither", change)
    return HttpSandbox(address, languages)
