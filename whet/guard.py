# SPDX-License-Identifier: Apache-2.0
"""Checks of requests to whet's HTTP servers: a request is refused before its body is read. No web framework here."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

FOREIGN = (
    "the request has {}; without an API key this server answers to addresses, localhost and its machine's name; start "
    "it with --api-key KEY, or with --host and that name"
)
LOCAL = ("127.0.0.1", "localhost", "::1")
HEAD_SECONDS = 15.0  # a connection that waits longer for the head of a request is closed, after at most twice this time


def is_own(host: str, own: str) -> bool:
    """Tells whether a Host header names this server: its name `own`, localhost, the machine's name, or an IP address.
    (Another name that resolves to this machine may belong to a foreign site.)"""
    name = re.sub(r":\d*$", "", host).strip("[]").lower()
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(name) and name in {"localhost", own.lower(), socket.gethostname().lower()}
    return True


class RefusedError(Exception):
    """Raised for a request that is refused, and not read any further. `status` is the HTTP status of the reply."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def check_client(headers: Mapping[str, str], own: str, api_key: str | None) -> None:
    """Checks that a request has the API key. If the server has no key, refuses requests from web pages of other sites,
    even if the site's name resolves to this machine.  Raises: RefusedError."""
    if api_key:
        given = headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
            what = "another API key than the server's" if given else "no API key"
            raise RefusedError(401, f"the request has {what}; send Authorization: Bearer KEY")
        return
    asked = {"Host": headers.get("host", ""), "Origin": headers.get("origin", "http://localhost").rpartition("/")[2]}
    for name, host in asked.items():
        if not is_own(host, own):
            raise RefusedError(403, FOREIGN.format(f"{name}: {host[:80]}"))


async def read_body(
    headers: Mapping[str, str],
    parts: AsyncIterator[bytes],
    most: int,
    seconds: float,
    expected: str = "application/json",
) -> bytes:
    """Reads the body of a request.  Raises: RefusedError for a body that is too large, too slow, or not of the content
    type `expected`: JSON, or another type that a web page cannot send to another origin without permission."""
    kind, body = headers.get("content-type", "").partition(";")[0].strip().lower(), bytearray()
    if kind != expected:
        raise RefusedError(415, f"the content type is {kind or 'missing'}; send Content-Type: {expected}")
    try:
        async with asyncio.timeout(seconds):
            async for part in parts:
                body += part
                if len(body) > most:
                    raise RefusedError(413, f"the body has more than {most:,} bytes; shorten it")
    except TimeoutError as error:
        raise RefusedError(408, f"the body did not come within {seconds:g} s") from error
    return bytes(body)


def with_deadline(protocol: Any) -> Any:
    """Returns a uvicorn protocol that closes a connection if a request's head does not arrive in time."""

    class WithDeadline(protocol):  # type: ignore[misc]
        """Closes a connection that waits for the head of a request, if no request has come since the last check."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.loop.call_later(HEAD_SECONDS, self._look, None)

        def _look(self, before: Any) -> None:
            waits = self.cycle is None or self.cycle.response_complete
            if waits and self.cycle is before:
                self.transport.close()
            if not self.transport.is_closing():
                self.loop.call_later(HEAD_SECONDS, self._look, self.cycle)

    return WithDeadline
