# SPDX-License-Identifier: Apache-2.0
"""The requests that the HTTP servers of whet refuse before they read them; nothing of a web framework is imported."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

LOCAL = ("127.0.0.1", "localhost", "::1")
HEAD_SECONDS = 15.0  # for the head of a request to come; a connection without one is closed within twice that


def is_own(host: str, own: str) -> bool:
    """Tells whether a Host header is the name that the server was given, localhost, the name of this machine, or an
    address: the name of a site that resolves to this machine is none of these."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return bool(name) and name in {"localhost", own.lower(), socket.gethostname().lower()}
    return True


def refusal(headers: Mapping[str, str], own: str, api_key: str | None) -> tuple[int, str] | None:
    """Status and message for a request that may not pass: without the API key, or, where the server has none, from a
    web page of another site, by its own name or by one that resolves to this machine."""
    if api_key:
        given = headers.get("authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
            return None
        what = "another API key than the server's" if given else "no API key"
        return 401, f"the request has {what}; send Authorization: Bearer KEY"
    origin = headers.get("origin")
    asked = {"Host": headers.get("host", "")} | ({} if origin is None else {"Origin": origin.rpartition("/")[2]})
    for name, host in asked.items():
        if not is_own(host, own):
            return 403, (
                f"the request has {name}: {host[:80]}; without an API key this server answers to addresses, localhost "
                "and its machine's name alone, so that no web page can use it; start it with --api-key KEY, or --host "
                "with that name"
            )
    return None


def is_json(headers: Mapping[str, str]) -> bool:
    """Tells whether a body says that it is JSON, which no page in a browser sends to another origin unasked."""
    return headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"


def with_deadline(protocol: Any) -> Any:
    """A protocol of uvicorn that closes connections on which no whole head of a request comes in time."""

    class WithDeadline(protocol):  # type: ignore[misc]
        """Compares its request with that of the look before."""

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
