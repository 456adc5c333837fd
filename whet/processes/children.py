# SPDX-License-Identifier: Apache-2.0
"""Children that are sent numbered messages and answer them, each with a deadline. One thread owns them.

Produces: events, from `poll`. Waits: in `poll` alone, for all children at a time, and never for one of them: what it
cannot take yet is kept, and what it has sent half of is read on when there is more.
"""

from __future__ import annotations

import math
import os
import select
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from whet.processes import frames
from whet.processes.fork_server import Child, ForkServer, exit_text

REPORT_SECONDS = 2.0  # from the end of a connection to the report how its process ended
LEAVE_SECONDS = 1.0  # for idle children to end by themselves, so that a user's open files are flushed
READ_BYTES = 1 << 18
BROKEN = "wrote what is no answer into its connection, or read from it, and was ended"
CLOSED = "closed its connection, and was ended"


class Talker(Child):
    """A child, and what is under way between it and its owner."""

    deadline = math.inf  # on the monotonic clock: when the child is killed. Its owner sets it
    is_closed = False  # its end of the connection is

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.connection.setblocking(False)
        self.unsent = bytearray()
        self.reader = frames.Reader()


@dataclass(frozen=True)
class Said:
    """A message of a child."""

    child: Talker
    number: int
    content: bytes


@dataclass(frozen=True)
class Gone:
    """The end of a child: it died, or was killed for what it wrote, or at its deadline."""

    child: Talker
    why: str  # stands after "the process" in a sentence
    is_late: bool = False


Event = Said | Gone


class Children:
    """The children of one template. `target` and `argument` are those of a ForkServer."""

    def __init__(self, target: str, argument: bytes = b"") -> None:
        self._server = ForkServer(target, argument)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._here: dict[int, Talker] = {}  # by descriptor

    def start(self) -> Talker:
        """A new child, which starts now."""
        child = self._server.spawn(Talker)
        self._here[child.connection.fileno()] = child
        return child

    def send(self, child: Talker, number: int, content: bytes) -> None:
        """Sends a message, sooner or later. A child that is gone takes it without an error: `poll` tells of it."""
        child.unsent += frames.pack(number, content)
        self._write(child)

    def kill(self, child: Talker) -> None:
        """Ends a child and all that it started; no event tells of it."""
        if self._here.pop(child.connection.fileno(), None) is not None:
            self._server.kill(child)

    def wake(self) -> None:
        """Ends the wait in `poll`; for any thread."""
        os.eventfd_write(self._wake, 1)

    def poll(self, seconds: float | None = None) -> list[Event]:
        """The events since the last call. Waits for the first until one comes, until `wake`, or that long."""
        waits = [child.deadline for child in self._here.values()]
        nearest = min(waits, default=math.inf) - time.monotonic()
        nearest = nearest if seconds is None else min(nearest, seconds)
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if self._here:
            poller.register(self._server, select.POLLIN)
        for descriptor, child in self._here.items():
            if not child.is_closed:
                poller.register(descriptor, select.POLLIN | (select.POLLOUT if child.unsent else 0))
        events: list[Event] = []
        for descriptor, mask in poller.poll(None if nearest == math.inf else max(0, math.ceil(nearest * 1000))):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif descriptor not in self._here:
                for ended in self._server.read():
                    self._bury(ended, events)
            else:
                if mask & select.POLLOUT:
                    self._write(self._here[descriptor])
                if mask & ~select.POLLOUT:
                    self._read(self._here[descriptor], events)
        self._end_late(events)
        return events

    def close(self, idle: Collection[Talker] = ()) -> None:
        """Ends all children; those that are idle may end by themselves first."""
        for child in idle:
            child.connection.close()
        until = time.monotonic() + LEAVE_SECONDS
        for child in idle:
            self._server.wait(child, until - time.monotonic())
        self._server.close()
        for child in self._here.values():
            child.connection.close()
        os.close(self._wake)

    def _write(self, child: Talker) -> None:
        try:
            while child.unsent:
                del child.unsent[: child.connection.send(child.unsent)]
        except BlockingIOError:
            return
        except OSError:
            child.unsent.clear()

    def _read(self, child: Talker, events: list[Event]) -> bool:
        """Takes what has arrived of a child.  Returns whether there may be more."""
        try:
            data = child.connection.recv(READ_BYTES)
            for number, content in child.reader.feed(data):
                events.append(Said(child, number, content))
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        except frames.BrokenMessageError:
            self.kill(child)
            events.append(Gone(child, BROKEN))
            return False
        if not data:
            child.is_closed = True
            child.deadline = min(child.deadline, time.monotonic() + REPORT_SECONDS)
        return not child.is_closed

    def _bury(self, ended: Child, events: list[Event]) -> None:
        """Takes the last messages of a child that has ended."""
        child = self._here.get(ended.connection.fileno())
        while child is not None and not child.is_closed and self._read(child, events):
            pass
        if child is not None and self._here.pop(child.connection.fileno(), None) is not None:
            child.connection.close()
            events.append(Gone(child, f"died: {exit_text(child.exit_code or 0)}"))

    def _end_late(self, events: list[Event]) -> None:
        """Ends children whose deadline has passed; a message that came in time counts, however late it is read."""
        spoke = {event.child for event in events}
        now = time.monotonic()
        for child in [child for child in self._here.values() if child.deadline < now and child not in spoke]:
            heard = len(events)
            if not child.is_closed:
                self._read(child, events)
            if len(events) == heard:
                self.kill(child)
                events.append(Gone(child, CLOSED) if child.is_closed else Gone(child, "is late", is_late=True))
