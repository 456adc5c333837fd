# SPDX-License-Identifier: Apache-2.0
"""Detects lost machines. Ray itself takes half a minute or more to report a lost machine.

The watch connects to a port on which each machine listens. A refused connection means that the listening process has
ended; two timeouts in a row mean that the machine or the network to it is down. Both are detected within ten
seconds."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial

from whet.processes.background import Background

PERIOD_SECONDS = 1.0
CONNECT_SECONDS = 3.5  # TCP repeats a lost packet after 1 s, and again after 2 s more

Address = tuple[str, int]


class Watch:
    """Checks all `addresses` (by name) every second in a thread, until `stop`. Calls `lost` with the name of each lost
    machine and the reason."""

    def __init__(self, addresses: Mapping[str, Address], lost: Callable[[str, str], None]) -> None:
        self._addresses, self._lost = dict(addresses), lost
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="whet-watch")
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()

    def _run(self) -> None:
        suspected: set[str] = set()
        threads = Background("whet-watch-one", len(self._addresses))
        while self._addresses and not self._stopped.wait(PERIOD_SECONDS):
            checks = {
                name: threads.submit(partial(connection_error, *address, CONNECT_SECONDS))
                for name, address in self._addresses.items()
            }
            failures = {name: error for name, check in checks.items() if (error := check.result()) is not None}
            for name, failure in failures.items():
                is_sure = name in suspected or isinstance(failure, ConnectionRefusedError)
                if is_sure and not self._stopped.is_set():
                    self._lost(name, _reason(failure, *self._addresses.pop(name)))
            suspected = set(failures)
        threads.close()


def connection_error(host: str, port: int, seconds: float) -> OSError | None:
    """Tries to connect to an address.  Returns the error, or None."""
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError as error:  # includes TimeoutError
        return error
    return None


def _reason(failure: OSError, address: str, port: int) -> str:
    if isinstance(failure, ConnectionRefusedError):
        return f"no process listens at {address}:{port} any more"
    reason = f" ({os.strerror(failure.errno)})" if failure.errno else ""
    return f"{address}:{port} does not answer{reason}: the machine or the network to it is down"
