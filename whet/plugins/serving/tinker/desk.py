# SPDX-License-Identifier: Apache-2.0
"""The state machine of sessions, models and requests, without socket, clock or thread. Times are arguments, in seconds.

A model runs its requests in the order of their `seq_id`. An early request is held until the earlier ones arrive; a
repeated request counts once. Models take turns. Each object belongs to a session, and each session to the owner of an
API key; other owners cannot see it. A session without a heartbeat ends with all its objects."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from whet.guard import RefusedError

MODEL, SAMPLER = ":train:", ":sample:"  # between the name of a session and a number
SMALL = 1000  # bytes of a result without tensors, about


@dataclass(frozen=True)
class Bounds:
    """The limits of one server."""

    sessions: int = 64
    models: int = 32
    waiting: int = 256  # requests of a model, beside the next one in order
    body_bytes: int = 2**30  # of all requests that wait
    unread_bytes: int = 2**28  # of a session's results that nobody has read
    session_seconds: float = 120.0  # without a heartbeat
    gap_seconds: float = 120.0  # for the request before a held request to arrive
    kept_seconds: float = 120.0  # that a result stays after it was read


@dataclass(frozen=True)
class RequestFailure:
    """The result of a failed request; `category` is "user" or "server"."""

    error: str
    category: str


Result = bytes | dict[str, Any] | RequestFailure
Work = Callable[[], Result | None]  # None: a part is done, call it again


@dataclass
class ClientSession:
    """A client's session."""

    name: str
    owner: str
    seen_at: float
    models: set[str] = field(default_factory=set)
    samplers: dict[str, str | None] = field(default_factory=dict)  # the path that each samples from; None: the base
    unread: int = 0  # bytes of results
    samples: int = 0  # that are not finished


@dataclass
class DeskRequest:
    """A request, and its result once it has one."""

    id: str
    session: ClientSession
    digest: bytes  # of the request's content
    size: int  # of the request, then of its result
    work: Work | None = None
    result: Result | None = None
    held_since: float = 0.0
    read_at: float | None = None


@dataclass
class Model:
    """The queue of a model's requests, in order."""

    session: ClientSession
    next: int = 0
    held: dict[int, DeskRequest] = field(default_factory=dict)
    ready: deque[DeskRequest] = field(default_factory=deque)


class Desk:
    """The open sessions of clients, their models, and the requests that run or have an unread result."""

    def __init__(self, bounds: Bounds, finished: Callable[[str], None] = lambda request: None) -> None:
        """Creates an empty desk. It calls `finished` with the id of each request that gets a result."""
        self.bounds, self._finished = bounds, finished
        self.sessions: dict[str, ClientSession] = {}
        self.models: OrderedDict[str, Model] = OrderedDict()
        self.requests: dict[str, DeskRequest] = {}
        self._bytes = 0

    def open(self, owner: str, name: str, now: float) -> None:
        """Opens a session.  Raises: RefusedError if there are too many."""
        self.check_room(owner, "sessions", self.bounds.sessions, lambda each: 1)
        self.sessions[name] = ClientSession(name, owner, now)

    def check_room(
        self, owner: str, what: str, most: int, held: Callable[[ClientSession], int], number: int = 1
    ) -> None:
        """Checks that an owner uses at most half of the capacity `most` that others leave, so that some capacity is
        always free.  Raises: RefusedError."""
        own = sum(held(each) for each in self.sessions.values() if each.owner == owner)
        others = sum(map(held, self.sessions.values())) - own
        if 2 * (own + number) > max(2, most - others + 1):
            found = f"{own + others} of {most} {what} are in use, {own} of them with your key"
            raise RefusedError(429, f"{found}; end some, or try again later")

    def session(self, owner: str, name: str, now: float | None = None) -> ClientSession:
        """Returns an owner's session. `now`, if given, counts as a heartbeat.  Raises: RefusedError."""
        found = self.sessions.get(name)
        if found is None or found.owner != owner:
            raise RefusedError(410, f"there is no session {name}; it has ended, or belongs to another key")
        found.seen_at = found.seen_at if now is None else now
        return found

    def owned(self, owner: str, name: str) -> ClientSession:
        """Returns the session of the model or sampler `name`.  Raises: RefusedError."""
        for part in (MODEL, SAMPLER):
            session = self.sessions.get(name.rpartition(part)[0])
            if session is not None and session.owner == owner and name in {*session.models, *session.samplers}:
                return session
        raise RefusedError(404, f"there is no model or sampler {name}; it has ended, or belongs to another key")

    def add_model(self, owner: str, session: str, number: int, now: float) -> str:
        """Adds a model, unless the session has a model with this number. Returns its name.  Raises: RefusedError."""
        own, name = self.session(owner, session, now), f"{session}{MODEL}{number}"
        if name not in own.models:
            self.check_room(owner, "models", self.bounds.models, lambda each: len(each.models))
        own.models.add(name)
        self.models.setdefault(name, Model(own))
        return name

    def add_sampler(self, session: ClientSession, number: int, path: str | None) -> str:
        """Adds a sampler, unless the session has this sampler. Returns its name.  Raises: RefusedError."""
        session.samplers[(name := self.sampler_name(session, number, path))] = path
        return name

    def sampler_name(self, session: ClientSession, number: int, path: str | None) -> str:
        """Returns the name of a sampler.  Raises: RefusedError if the number belongs to a sampler of other weights."""
        name = f"{session.name}{SAMPLER}{number}"
        if session.samplers.get(name, path) != path:
            raise RefusedError(422, f"sampler {name} was created before, for other weights")
        return name

    def enter(self, model: str, seq: int, digest: bytes, work: Work, size: int, now: float) -> DeskRequest:
        """Queues a model's request by `seq`; returns the earlier request if it repeats one.  Raises: RefusedError."""
        own, name = self.models[model], f"{model}:{seq}"
        if (known := self._known(name, digest)) is not None:
            return known
        if seq < own.next:
            raise RefusedError(422, f"seq_id={seq} of {model} is too low; the next one is {own.next}")
        full = len(own.held) + len(own.ready) >= self.bounds.waiting or self._bytes + size > self.bounds.body_bytes
        if full and seq != own.next:
            raise RefusedError(429, f"too many requests wait for {model}; send it again later")
        request = own.held[seq] = self._add(DeskRequest(name, own.session, digest, size, work, held_since=now))
        while (first := own.held.pop(own.next, None)) is not None:
            own.ready.append(first)
            own.next += 1
        return request

    def has(self, model: str, seq: int) -> bool:
        """Tells whether a request of a model has come, and its result is not yet dropped."""
        return f"{model}:{seq}" in self.requests

    def note(self, name: str, session: ClientSession, digest: bytes) -> bool:
        """Adds a request that needs no order, such as sampling.  Returns whether it is new.  Raises: RefusedError."""
        if is_new := self._known(name, digest) is None:
            self._add(DeskRequest(name, session, digest, 0))
        return is_new

    def _known(self, name: str, digest: bytes) -> DeskRequest | None:
        known = self.requests.get(name)
        if known is not None and known.digest != digest:
            raise RefusedError(422, f"request {name} was sent before, and asked for something else")
        return known

    def _add(self, request: DeskRequest) -> DeskRequest:
        if request.session.unread > self.bounds.unread_bytes:
            raise RefusedError(429, "too many results of this session wait to be read; read some")
        self.requests[request.id] = request
        self._bytes += request.size
        return request

    def take(self) -> DeskRequest | None:
        """Takes the next request to run from the queues; models take turns."""
        for name, model in self.models.items():
            if model.ready:
                self.models.move_to_end(name)
                return model.ready.popleft()
        return None

    def put_back(self, request: DeskRequest) -> None:
        """Puts an unfinished request back, as the next request of its model."""
        if (model := self.models.get(request.id.rpartition(":")[0])) is not None:
            model.ready.appendleft(request)

    def finish(self, name: str, result: Result) -> None:
        """Stores the result of a request, unless the request's session has ended."""
        request = self.requests.get(name)
        if request is not None and request.result is None:
            request.result, request.work = result, None
            self._bytes -= request.size
            request.size = len(result) if isinstance(result, bytes) else SMALL
            request.session.unread += request.size
            self._finished(name)

    def find(self, owner: str, name: str) -> DeskRequest:
        """Returns a request of an owner.  Raises: RefusedError."""
        request = self.requests.get(name)
        if request is None or request.session.owner != owner:
            found = "its session has ended, or its result was read long ago"
            raise RefusedError(410, f"there is no request {name}; {found}")
        return request

    def read(self, owner: str, name: str, now: float) -> Result:
        """Returns the result of a finished request, and notes that it was read.  Raises: RefusedError."""
        request = self.find(owner, name)
        assert request.result is not None
        if request.read_at is None:
            request.session.unread -= request.size
            request.read_at = now
        return request.result

    def sweep(self, now: float) -> list[tuple[str, ClientSession]]:
        """Ends sessions without a heartbeat, fails requests that wait for a missing earlier one, and drops results that
        were read.  Returns the ended sessions."""
        for model in self.models.values():
            if model.held and now - min(each.held_since for each in model.held.values()) > self.bounds.gap_seconds:
                late, model.next = list(model.held.values()), max(model.held) + 1
                model.held.clear()
                for request in late:
                    found = f"an earlier request did not arrive within {self.bounds.gap_seconds:g} s"
                    self.finish(request.id, RequestFailure(found, "user"))
        for name, request in list(self.requests.items()):
            if request.read_at is not None and now - request.read_at > self.bounds.kept_seconds:
                del self.requests[name]
        gone = [name for name, each in self.sessions.items() if now - each.seen_at > self.bounds.session_seconds]
        return [(name, self.end(name)) for name in gone]

    def end(self, name: str) -> ClientSession:
        """Ends a session and drops all its objects.  Returns the session."""
        session = self.sessions.pop(name)
        for model in session.models:
            del self.models[model]
        for request in [each for each in self.requests.values() if each.session is session]:
            self._bytes -= request.size if request.result is None else 0
            del self.requests[request.id]
            self._finished(request.id)  # wakes the call that waits for the result
        return session
