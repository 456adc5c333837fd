# SPDX-License-Identifier: Apache-2.0
"""Children that serve calls, each call with a deadline. One thread owns them.

Produces: events, from `poll`. Waits: in `poll` alone, for all children at a time, and never for one of them: what it
cannot take yet is kept, and what it has sent half of is read on when there is more.
"""

from __future__ import annotations

import math
import os
import pickle
import select
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from whet.processes import frames
from whet.processes.fork_server import Child, ForkServer, exit_text

REPORT_SECONDS = 2.0  # from the end of a connection to the report how its process ended
LEAVE_SECONDS = 1.0  # for idle children to end by themselves, so that a user's open files are flushed
READ_BYTES = 1 << 18
BROKEN = "wrote what is no answer into its connection, or read from it, and was ended"
CLOSED = "closed its connection, and was ended"


@dataclass
class Call:
    """A call that a child has yet to answer."""

    about: Any  # the owner's own
    seconds: float
    deadline: float = math.inf  # on the monotonic clock; none before the child begins


class Talker(Child):
    """A child, and what is under way between it and its owner."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.connection.setblocking(False)
        self.calls: dict[int, Call] = {}  # by number, oldest first
        self.unsent = bytearray()
        self.reader = frames.Reader()
        self.leaves_by = math.inf  # once its end of the connection is closed

    @property
    def is_open(self) -> bool:
        """True while messages of the child may still come."""
        return self.leaves_by == math.inf

    @property
    def deadline(self) -> float:
        """The time.monotonic() at which the child is killed."""
        return min([self.leaves_by, *(call.deadline for call in self.calls.values())])


@dataclass(frozen=True)
class Answer:
    """The answer to a call."""

    child: Talker
    about: Any
    value: Any


@dataclass(frozen=True)
class Gone:
    """The end of a child: it died, or was killed for what it wrote, or at a deadline."""

    child: Talker
    why: str  # stands after "the process" in a sentence
    at_work: Any = None  # what the call is about that it was serving; None between two calls
    waiting: tuple[Any, ...] = ()  # the same of its other calls, oldest first
    is_late: bool = False


Event = Answer | Gone


class Children:
    """The children of one template. `target` and `argument` are those of a ForkServer.

    Answers are pickles of objects of the types `answers`; a child that sends anything else is ended. Where `in_turn`, a
    child serves its calls one after the other, and the time of each counts from the end of the one before.
    """

    def __init__(
        self, target: str, argument: bytes = b"", *, answers: tuple[type, ...] = (object,), in_turn: bool = False
    ) -> None:
        self._server, self._answers, self._in_turn = ForkServer(target, argument), answers, in_turn
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._here: dict[int, Talker] = {}  # by descriptor
        self._next = 1

    @property
    def running(self) -> Collection[Talker]:
        """The children that have not ended."""
        return self._here.values()

    def start(self) -> Talker:
        """A new child, which starts now."""
        child = self._server.spawn(Talker)
        self._here[child.connection.fileno()] = child
        return child

    def call(self, child: Talker, about: Any, content: bytes, seconds: float) -> None:
        """Sends a call, sooner or later. A child that is gone takes it without an error: `poll` tells of it."""
        child.calls[self._next] = call = Call(about, seconds)
        if not self._in_turn or len(child.calls) == 1:
            call.deadline = time.monotonic() + seconds
        child.unsent += frames.pack(self._next, content)
        self._next += 1
        self._write(child)

    def kill(self, child: Talker) -> None:
        """Ends a child and all that it started; no event tells of it."""
        if self._here.pop(child.connection.fileno(), None) is not None:
            self._server.kill(child)

    def wake(self) -> None:
        """Ends the wait in `poll`; for any thread."""
        os.eventfd_write(self._wake, 1)

    def poll(self, seconds: float = math.inf) -> list[Event]:
        """The events since the last call. Waits for the first until one comes, until `wake`, or that long."""
        nearest = min([seconds, *(child.deadline - time.monotonic() for child in self.running)])
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if self._here:
            poller.register(self._server, select.POLLIN)
        for descriptor, child in self._here.items():
            if child.is_open:
                poller.register(descriptor, select.POLLIN | (select.POLLOUT if child.unsent else 0))
        events: list[Event] = []
        for descriptor, mask in poller.poll(None if nearest == math.inf else max(0, math.ceil(nearest * 1000))):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif descriptor not in self._here:
                self._bury(self._server.read(), events)
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
        for child in self.running:
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
                events.append(self._answer(child, number, content))
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        except frames.BrokenMessageError:
            self.kill(child)
            events.append(_gone(child, BROKEN))
            return False
        if not data:
            child.leaves_by = time.monotonic() + REPORT_SECONDS
        return bool(data)

    def _answer(self, child: Talker, number: int, content: bytes) -> Answer:
        """Raises: BrokenMessageError, of what is no answer to a call under way."""
        due = next(iter(child.calls), None) if self._in_turn else number
        try:
            value = pickle.loads(content)
        except Exception as error:  # the user's code may write anything
            raise frames.BrokenMessageError from error
        if number != due or number not in child.calls or not isinstance(value, self._answers):
            raise frames.BrokenMessageError
        answered = child.calls.pop(number)
        if self._in_turn and child.calls:
            following = next(iter(child.calls.values()))
            following.deadline = time.monotonic() + following.seconds
        return Answer(child, answered.about, value)

    def _bury(self, ended: Iterable[Child], events: list[Event]) -> None:
        """Takes the last messages of children that have ended."""
        for child in [self._here[fd] for each in ended if (fd := each.connection.fileno()) in self._here]:
            while child.is_open and self._read(child, events):
                pass
            if self._here.pop(child.connection.fileno(), None) is not None:
                child.connection.close()
                events.append(_gone(child, f"died: {exit_text(child.exit_code or 0)}"))

    def _end_late(self, events: list[Event]) -> None:
        """Ends children whose deadline has passed; a message that came in time counts, however late it is read."""
        spoke = {event.child for event in events}
        now = time.monotonic()
        for child in [child for child in self.running if child.deadline < now and child not in spoke]:
            heard = len(events)
            if child.is_open:
                self._read(child, events)
            if len(events) == heard:
                self.kill(child)
                events.append(_gone(child, "is late", is_late=True) if child.is_open else _gone(child, CLOSED))


def _gone(child: Talker, why: str, *, is_late: bool = False) -> Gone:
    calls = list(child.calls.values())
    at_work = min(calls, key=lambda call: call.deadline, default=None) if is_late else next(iter(calls), None)
    waiting = tuple(call.about for call in calls if call is not at_work)
    return Gone(child, why, None if at_work is None else at_work.about, waiting, is_late)
