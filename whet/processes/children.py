# SPDX-License-Identifier: Apache-2.0
"""Child processes that serve calls, each call with a deadline. One thread owns them.

`poll` returns events. It is the only method that waits, and it waits for all children together. Bytes that a child does
not accept yet stay in a buffer; an incomplete message is completed when its other bytes arrive."""

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

REPORT_SECONDS = 2.0  # from the end of a connection to the exit code of its process
LEAVE_SECONDS = 1.0  # for idle children to exit by themselves, so that the user's open files are flushed
READ_BYTES = 1 << 18
BROKEN = "wrote bytes that are no reply into its connection, or read from it, and was killed"
CLOSED = "closed its connection, and was killed"


@dataclass
class UnansweredCall:
    """A call that has no reply yet."""

    task: Any  # the owner's object for the call
    seconds: float
    deadline: float = math.inf  # on the monotonic clock; infinite until the child begins the call


class Callee(Child):
    """A child process, with its pending calls, its unsent bytes and its incomplete messages."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connection.setblocking(False)
        self.calls: dict[int, UnansweredCall] = {}  # by number, oldest first
        self.unsent = bytearray()
        self.reader = frames.FrameReader()
        self.leaves_by = math.inf  # finite once its end of the connection is closed

    @property
    def is_open(self) -> bool:
        """True while messages of the child may still arrive."""
        return self.leaves_by == math.inf

    @property
    def deadline(self) -> float:
        """The time on the clock `time.monotonic` at which the child is killed."""
        return min([self.leaves_by, *(call.deadline for call in self.calls.values())])


@dataclass(frozen=True)
class Reply:
    """The reply to a call."""

    child: Callee
    task: Any
    value: Any


@dataclass(frozen=True)
class Ended:
    """The end of a child: it died, or it was killed for a broken message or at a deadline."""

    child: Callee
    why: str  # follows "the process" in a sentence
    running: Any = None  # the task of the call that it was serving; None between two calls
    waiting: tuple[Any, ...] = ()  # the tasks of its other calls, oldest first
    is_late: bool = False


Event = Reply | Ended


class Children:
    """The child processes of one template process. `target`, `argument` and `name` are arguments of its ForkServer.

    Replies are pickled objects of the types `replies`; a child that sends anything else is killed. With `in_turn` a
    child serves its calls one after the other, and the deadline of a call counts from the end of the call before it.
    `in_turn` may be changed while no child has two calls.
    """

    def __init__(
        self,
        target: str,
        argument: bytes = b"",
        *,
        replies: tuple[type, ...] = (object,),
        in_turn: bool = False,
        name: str = "child",
    ) -> None:
        self._server, self._replies, self.in_turn = ForkServer(target, argument, name=name), replies, in_turn
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._running: dict[int, Callee] = {}  # by descriptor
        self._next = 1

    @property
    def running(self) -> Collection[Callee]:
        """The children that have not ended."""
        return self._running.values()

    def start(self) -> Callee:
        """Starts a child and returns it."""
        child = self._server.spawn(Callee)
        self._running[child.connection.fileno()] = child
        return child

    def call(self, child: Callee, task: Any, content: bytes, seconds: float) -> None:
        """Sends a call without waiting. If the child has ended, no error is raised here; `poll` returns an `Ended`."""
        child.calls[self._next] = call = UnansweredCall(task, seconds)
        if not self.in_turn or len(child.calls) == 1:
            call.deadline = time.monotonic() + seconds
        child.unsent += frames.pack(self._next, content)
        self._next += 1
        self._write(child)

    def kill(self, child: Callee) -> None:
        """Ends a child and all processes that it started. No event follows."""
        if self._running.pop(child.connection.fileno(), None) is not None:
            self._server.kill(child)

    def wake(self) -> None:
        """Makes a waiting `poll` return. Any thread may call it."""
        os.eventfd_write(self._wake, 1)

    def poll(self, seconds: float = math.inf) -> list[Event]:
        """Returns the events since the last call. Waits for the first one, for `wake`, or for `seconds`."""
        nearest = min([seconds, *(child.deadline - time.monotonic() for child in self.running)])
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if self._running or self._server.is_ending:
            poller.register(self._server, select.POLLIN)
        for descriptor, child in self._running.items():
            if child.is_open:
                poller.register(descriptor, select.POLLIN | (select.POLLOUT if child.unsent else 0))
        events: list[Event] = []
        for descriptor, mask in poller.poll(None if nearest == math.inf else max(0, math.ceil(nearest * 1000))):
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif descriptor not in self._running:
                self._remove(self._server.read(), events)
            else:
                if mask & select.POLLOUT:
                    self._write(self._running[descriptor])
                if mask & ~select.POLLOUT:
                    self._read(self._running[descriptor], events)
        self._kill_late(events)
        return events

    def close(self, idle: Collection[Callee] = ()) -> None:
        """Ends all children; the children in `idle` may exit by themselves first."""
        for child in idle:
            child.connection.close()
        until = time.monotonic() + LEAVE_SECONDS
        for child in idle:
            self._server.wait(child, until - time.monotonic())
        self._server.close()
        for child in self.running:
            child.connection.close()
        os.close(self._wake)

    def _write(self, child: Callee) -> None:
        try:
            while child.unsent:
                del child.unsent[: child.connection.send(child.unsent)]
        except BlockingIOError:
            return
        except OSError:
            child.unsent.clear()

    def _read(self, child: Callee, events: list[Event]) -> bool:
        """Reads the messages of a child that have arrived.  Returns True if more may follow."""
        try:
            data = child.connection.recv(READ_BYTES)
            for number, content in child.reader.feed(data):
                events.append(self._reply(child, number, content))
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        except frames.BrokenMessageError:
            self.kill(child)
            events.append(_ended(child, BROKEN))
            return False
        if not data:
            child.leaves_by = time.monotonic() + REPORT_SECONDS
        return bool(data)

    def _reply(self, child: Callee, number: int, content: bytes) -> Reply:
        """Reads the reply in a message.  Raises: BrokenMessageError if the message is no reply to a pending call."""
        due = next(iter(child.calls), None) if self.in_turn else number
        try:
            value = pickle.loads(content)
        except Exception as error:  # the user's code may write anything
            raise frames.BrokenMessageError from error
        if number != due or number not in child.calls or not isinstance(value, self._replies):
            raise frames.BrokenMessageError
        call = child.calls.pop(number)
        if self.in_turn and child.calls:
            following = next(iter(child.calls.values()))
            following.deadline = time.monotonic() + following.seconds
        return Reply(child, call.task, value)

    def _remove(self, ended: Iterable[Child], events: list[Event]) -> None:
        """Reads the last messages of children that have ended, and closes their connections."""
        for child in [self._running[fd] for each in ended if (fd := each.connection.fileno()) in self._running]:
            while child.is_open and self._read(child, events):
                pass
            if self._running.pop(child.connection.fileno(), None) is not None:
                child.connection.close()
                events.append(_ended(child, f"died: {exit_text(child.exit_code or 0)}"))

    def _kill_late(self, events: list[Event]) -> None:
        """Kills children whose deadline has passed. A message that arrived in time counts, even if read late."""
        replied = {event.child for event in events}
        now = time.monotonic()
        for child in [child for child in self.running if child.deadline < now and child not in replied]:
            before = len(events)
            if child.is_open:
                self._read(child, events)
            if len(events) == before:
                self.kill(child)
                events.append(_ended(child, "is late", is_late=True) if child.is_open else _ended(child, CLOSED))


def _ended(child: Callee, why: str, *, is_late: bool = False) -> Ended:
    calls = list(child.calls.values())
    running = min(calls, key=lambda call: call.deadline, default=None) if is_late else next(iter(calls), None)
    waiting = tuple(call.task for call in calls if call is not running)
    return Ended(child, why, None if running is None else running.task, waiting, is_late)
