# SPDX-License-Identifier: Apache-2.0
"""A watch over machines: Ray itself takes half a minute and more to say that one is gone.

Each is asked for a connection to a port on which it listens. One that refuses has lost the process that listened; one
that is silent twice in a row is gone, or the network to it is cut. Ten seconds are enough for either.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial

from whet.processes.background import Background

PERIOD_SECONDS = 1.0
SILENCE_SECONDS = 3.5  # one lost packet is sent again after 1 s, a second one after 2 s more

Address = tuple[str, int]


class Watch:
    """Asks all of them again and again, in a thread, until `stop` or until it has called `lost` with what is gone (a
    name of `addresses`) and why."""

    def __init__(self, addresses: Mapping[str, Address], lost: Callable[[str, str], None]) -> None:
        self._addresses, self._lost = dict(addresses), lost
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="whet-watch")
        self._thread.start()

    def stop(self) -> None:
        """Asks no more."""
        self._stopped.set()

    def _run(self) -> None:
        suspected: set[str] = set()
        threads = Background("whet-watch-one", len(self._addresses))
        while not self._stopped.wait(PERIOD_SECONDS):
            asked = {
                name: threads.submit(partial(silence, *place, SILENCE_SECONDS))
                for name, place in self._addresses.items()
            }
            failures = {name: error for name, answer in asked.items() if (error := answer.result()) is not None}
            for name, failure in failures.items():
                if name in suspected or isinstance(failure, ConnectionRefusedError):
                    if not self._stopped.is_set():
                        self._lost(name, _reason(failure, *self._addresses[name]))
                    self._stopped.set()
                    break
            suspected = set(failures)
        threads.close()


def silence(host: str, port: int, seconds: float) -> OSError | None:
    """Returns why nothing answers at an address; None where something does."""
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError as error:  # TimeoutError is one
        return error
    return None


def _reason(failure: OSError, address: str, port: int) -> str:
    if isinstance(failure, ConnectionRefusedError):
        return f"nobody listens at {address}:{port} any more"
    said = f" ({os.strerror(failure.errno)})" if failure.errno else ""
    return f"{address}:{port} does not answer{said}: the machine is gone, or the network to it is cut"
