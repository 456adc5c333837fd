# SPDX-License-Identifier: Apache-2.0
"""Requests to servers that may fail, hang or lie: one deadline for all attempts of a call, and a largest reply size."""

from __future__ import annotations

import asyncio
import email.utils
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from whet.keyed import key
from whet.limits import REPLY_BYTES
from whet.processes.background import in_loop

if TYPE_CHECKING:
    import httpx  # imported with the first request

T = TypeVar("T")
CONNECT_SECONDS = 10.0  # of one attempt
MOST_REQUESTS = 2  # of a client at a time
IDLE_SECONDS = 2.0  # after which an unused connection is closed here, before the server does it beside a new request
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 30.0  # before the second attempt, and before any
MOST_ASKED_SECONDS = 300.0  # of a wait that a server asks for
PASSING, LASTING = frozenset({408, 409, 425, 429}), frozenset({501, 505})  # status; all others from 500 on pass too
SHOWN_BYTES = 600  # of a refusal


class CallError(Exception):
    """Raised for a request without a usable reply; callers convert it to a WhetError. `status` is 0 if no reply came.
    `passes`: the failure may be temporary, so another attempt after `seconds` may succeed."""

    def __init__(self, why: str, *, status: int = 0, seconds: float = 0.0, passes: bool = True) -> None:
        super().__init__(why)
        self.status, self.seconds, self.passes = status, seconds, passes


class Http:
    """HTTP connections that are reused, in one event loop at a time. With `is_local`, for servers of this machine only:
    without proxies."""

    def __init__(self, *, is_local: bool = False) -> None:
        self._is_local = is_local
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clients: list[tuple[httpx.AsyncClient, asyncio.Semaphore]] = []  # each with its room for requests

    @asynccontextmanager
    async def stream(
        self, method: str, url: str, body: Any = None, *, headers: Mapping[str, str] | None = None, follow: bool = False
    ) -> AsyncIterator[httpx.Response]:
        """Yields a reply with status 200, whose content may still be arriving. `body` is sent as JSON; redirects fail
        unless `follow` is set. The end of the block or of its task closes the connection.  Raises: CallError."""
        import httpx

        try:
            (client, room), kind = self._client(), {} if body is None else {"Content-Type": "application/json"}
            content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
            request = client.build_request(method, url, content=content, headers={**kind, **(headers or {})})
        except (httpx.InvalidURL, UnicodeError) as error:
            raise CallError(f"it cannot be sent ({error})", passes=False) from error
        try:
            async with room, aclosing(await client.send(request, stream=True, follow_redirects=follow)) as reply:
                if reply.status_code != 200:
                    raise await _refusal(reply)
                yield reply
        except httpx.HTTPError as error:
            passes = not isinstance(error, httpx.UnsupportedProtocol)
            raise CallError(f"{type(error).__name__}: {_system_error(error) or error}", passes=passes) from error

    async def close(self) -> None:
        """Closes the connections."""
        clients, self._clients, self._loop = self._clients, [], None
        for client, _ in clients:
            await client.aclose()

    def _client(self) -> tuple[httpx.AsyncClient, asyncio.Semaphore]:
        """Returns the first client with room, which is to be taken at once. A client looks at all its connections for
        each request, so that many requests need several clients."""
        import httpx

        if self._loop is not (loop := asyncio.get_running_loop()):
            self._clients, self._loop, self._tls = [], loop, None
        if found := next((each for each in self._clients if not each[1].locked()), None):
            return found
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_SECONDS)
        timeout, trusts = httpx.Timeout(None, connect=None if self._is_local else CONNECT_SECONDS), not self._is_local
        try:
            self._tls = self._tls or httpx.create_ssl_context(trust_env=trusts)
            client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=trusts, verify=self._tls)
        except (ValueError, OSError, ImportError, httpx.InvalidURL) as error:
            variables = "proxies (HTTP_PROXY, ALL_PROXY, NO_PROXY) or certificates (SSL_CERT_FILE)"
            raise CallError(f"environment variables of {variables}: {error}", passes=False) from error
        self._clients.append((client, asyncio.Semaphore(MOST_REQUESTS)))
        return self._clients[-1]


async def read(reply: httpx.Response, most: int = REPLY_BYTES, *, passes: bool = False, cuts: bool = False) -> bytes:
    """Reads the content of a reply.  Raises: CallError if it has more than `most` bytes, unless `cuts` truncates it."""
    content = bytearray()
    async for part in reply.aiter_bytes():
        content += part
        if len(content) > most and not cuts:
            raise CallError(f"its reply has more than {most:,} bytes", status=reply.status_code, passes=passes)
        if len(content) >= most and cuts:
            break
    return bytes(content[:most])


async def insist(attempt: Callable[[int], Awaitable[T]], seconds: float, attempts: int, name: object) -> T:
    """Calls `attempt` with 0, 1, ... until a call succeeds, and returns its result. Waits between attempts double, last
    at least as long as the server asks, and vary with `name`.  Raises: the last CallError; any other error."""
    now = asyncio.get_running_loop().time
    until, failed = now() + seconds, CallError(f"no reply in {seconds:g} s")
    for number in range(attempts):
        try:
            async with asyncio.timeout_at(until):
                return await attempt(number)
        except TimeoutError:
            if now() >= until:
                break
            failed = CallError("no reply in time")
        except CallError as error:
            failed = error
        if not failed.passes or number + 1 == attempts:
            break
        share = key(number, "wait for a server", str(name)) / 2**63
        wait = max(failed.seconds, min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2**number) * (0.5 + 0.5 * share))
        if now() + wait > until:
            late = f"{failed}; a retry in {wait:.1f} s would be after the deadline"
            raise CallError(late, status=failed.status) from failed
        await asyncio.sleep(wait)
    raise failed


_shared = Http()


def fetch(
    method: str, url: str, read_as: Callable[[bytes], T], *, seconds: float, attempts: int, most: int, **sent: Any
) -> T:
    """Sends a request, reads at most `most` bytes of reply, and converts them by `read_as`; any thread may call. After
    a ValueError of `read_as` it tries again. `sent` has more arguments of `stream`.  Raises: CallError."""

    async def attempt(number: int) -> T:
        async with _shared.stream(method, url, **sent) as reply:
            content = await read(reply, most)
        try:
            return read_as(content)
        except ValueError as error:
            raise CallError(str(error), status=200) from error

    call = in_loop(insist(attempt, seconds, attempts, (url, sent.get("body"))))
    try:
        return call.result()
    finally:
        call.cancel()  # if this thread was interrupted


def shown(url: str) -> str:
    """Removes the secrets from an address: user, password, query and fragment."""
    bare, mark, _ = re.sub(r"//[^/?#]*@", "//", url).partition("#")[0].partition("?")
    return f"{bare}?..." if mark else bare


def _system_error(error: BaseException) -> OSError | None:
    """Returns the innermost error of the operating system behind an error of httpx."""
    inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
    found = None if inner is None else _system_error(inner)
    return found or (error if isinstance(error, OSError) else None)


async def _refusal(reply: httpx.Response) -> CallError:
    status, said = reply.status_code, (await read(reply, SHOWN_BYTES, cuts=True)).decode(errors="replace")
    where = f" to {shown(reply.headers['Location'])}" if "Location" in reply.headers else ""
    passes, wait = status in PASSING or (status >= 500 and status not in LASTING), 0.0
    asked = reply.headers.get("Retry-After", "")
    with suppress(ValueError, TypeError, OverflowError):  # neither a number nor a date
        wait = float(asked) if asked.isdecimal() else email.utils.parsedate_to_datetime(asked).timestamp() - time.time()
    wait = min(max(0.0, wait), MOST_ASKED_SECONDS)
    return CallError(f"status {status}{where}: {said}", status=status, seconds=wait, passes=passes)
