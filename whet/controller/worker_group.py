# SPDX-License-Identifier: Apache-2.0
"""Worker groups: the ranks of a role, called as one object through the transport of a backend."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from whet.controller.dispatch import Arguments, CallPlan, check_layouts, plan_call, registered_methods, whole_call
from whet.controller.local_workers import LocalWorkers
from whet.controller.worker import RankLayout, Worker
from whet.engines.protocol import Objective
from whet.errors import DeadlineError, LostWorkerError, WhetError, WorkerError, did_you_mean

Reply = concurrent.futures.Future[Any]
LAUNCH_AGAIN = "launch the workers again"
RAISE_DEADLINE = "if the call may take longer, raise cluster.deadline_seconds; the processes were ended"


class Transport(Protocol):
    """A backend's connection to the ranks. One transport serves all roles that share its processes."""

    def send(self, role: str, method: str, arguments: Mapping[int, Arguments]) -> dict[int, Reply]:
        """Starts `method` on the ranks in `arguments`, and returns a reply for each at once.

        A rank serves its calls in the order of sending. A failed reply holds a WhetError that names role, rank and
        method. After it all open calls fail and all processes end. The loss of a replica (`Worker.is_replica`) is the
        exception: it fails only the calls of this rank."""

    ended: threading.Event  # set once all processes end

    def give_up(self, role: str, ranks: Sequence[int], error: WhetError) -> None:
        """Ends ranks that do not answer, and fails their open calls. Unless they are replicas, all processes end."""
        self.abort(error)

    def start_again(self, role: str, rank: int) -> Reply:
        """Starts a process with workers to replace a lost rank, and returns at once."""
        found = "in this process, where it cannot be started again"
        raise WorkerError(f"{role} rank {rank}", found, "a rank in another process")

    def abort(self, error: WhetError) -> None:
        """Ends all processes now, and fails the open calls with `error`."""

    def close(self) -> None:
        """Closes the workers and ends their processes. May be called twice."""


@dataclass(frozen=True, eq=False)
class PendingCall:
    """A started call on the ranks of a group. A process runs its calls in order, except concurrent ones."""

    role: str
    method: str
    replies: Mapping[int, Reply]  # by rank
    plan: CallPlan
    transport: Transport
    deadline_seconds: float
    started_at: float = field(default_factory=time.monotonic)

    @property
    def is_lost(self) -> bool:
        """True while processes of the launch still run: an error of this call then means the loss of its ranks only."""
        return not self.transport.ended.is_set()

    def done(self) -> bool:
        """Tells whether `result` would return or raise at once."""
        return all(reply.done() for reply in self.replies.values())

    def result(self, deadline_seconds: float | None = None) -> Any:
        """Waits for the ranks, by default as long as the launch allows.  Returns the gathered result.

        Raises: WorkerError or the WhetError of a worker; DeadlineError. Then the group is closed, unless `is_lost`."""
        seconds = self.deadline_seconds if deadline_seconds is None else deadline_seconds
        until = concurrent.futures.FIRST_EXCEPTION
        finished, late = concurrent.futures.wait(self.replies.values(), timeout=seconds, return_when=until)
        for reply in finished:
            reply.result()
        if late:
            raise self.give_up(seconds)
        return self.plan.collect({rank: reply.result() for rank, reply in self.replies.items()})

    def expire(self) -> None:
        """Gives up if the ranks have not answered within the deadline, counted from the start of the call."""
        if not self.done() and time.monotonic() - self.started_at > self.deadline_seconds:
            self.give_up(self.deadline_seconds)

    def give_up(self, seconds: float) -> DeadlineError:
        """Ends the ranks that have not answered within `seconds`.  Returns the error that `result` then raises."""
        late = [rank for rank, reply in self.replies.items() if not reply.done()]
        place = f"{self.role} rank {', '.join(map(str, late))}, {self.method}"
        error = DeadlineError(place, f"no answer within {seconds:g} s", change=RAISE_DEADLINE)
        self.transport.give_up(self.role, late, error)
        return error


class WorkerGroup:
    """The ranks of a role. The registered methods of its worker class are attributes of the group:
    `group.update(batch)` dispatches the arguments in the method's mode and returns the gathered result.

    Roles of one launch share processes, so a failure or `close` of one group closes all groups."""

    here: LocalWorkers | None = None  # the workers, if they are in this process

    def __init__(
        self, role: str, cls: type[Worker], layouts: Sequence[RankLayout], transport: Transport, deadline_seconds: float
    ) -> None:
        check_layouts(layouts, role)
        self.role = role
        self.reporting = [rank for rank, layout in enumerate(layouts) if layout.is_reporting]
        self.world_size, self.dp_size = len(layouts), layouts[0].dp_size
        self._layouts, self._transport, self._deadline_seconds = layouts, transport, deadline_seconds
        self._class_name, self._methods = cls.__qualname__, registered_methods(cls)

    def call(self, method: str, *args: Any, block: int | str | None = None, **kwargs: Any) -> Any:
        """Calls `method` on the ranks, in its dispatch mode.  Returns the gathered result.

        If rows are split, the rows of a `block` stay on one rank. A number means so many consecutive rows (2 for
        preference pairs); a column's name means the rows with an equal value. The default is the block of an objective
        in `args`. Ranks get equal work, measured by the column `attention_mask` or the `token_ids` of list items.

        Raises: DataError for arguments that do not fit the mode; the errors of `PendingCall.result`."""
        return self.start(method, *args, block=block, **kwargs).result()

    def start(self, method: str, *args: Any, block: int | str | None = None, **kwargs: Any) -> PendingCall:
        """Starts `call` without waiting. Within one process the call has finished on return."""
        caller = f"{self.role}.{method}"
        if method not in self._methods:
            registered = f"a method of {self._class_name}: {', '.join(self._methods)}"
            raise WorkerError(caller, "not registered", registered, did_you_mean(method, self._methods))
        mode, arguments = self._methods[method], Arguments(args, kwargs)
        block = block or next((each.block for each in args if isinstance(each, Objective)), 1)
        plan = whole_call(mode, arguments, caller) if self.world_size == block == 1 else None
        return self._send(method, plan or plan_call(mode, self._layouts, arguments, caller, block))

    def start_on(self, rank: int, method: str, *args: Any) -> PendingCall:
        """Starts a call on one rank only, with its own arguments, regardless of the method's dispatch mode."""
        return self._send(method, CallPlan({rank: Arguments(args, {})}, lambda results: results[rank]))

    def start_again(self, rank: int) -> PendingCall:
        """Starts a new process to replace a lost rank."""
        replies = {rank: self._transport.start_again(self.role, rank)}
        return PendingCall(self.role, "start", replies, CallPlan({}, dict), self._transport, self._deadline_seconds)

    def close(self) -> None:
        """Closes the workers of all roles of the launch, and ends their processes. May be called twice."""
        self._transport.close()

    def _send(self, method: str, plan: CallPlan) -> PendingCall:
        replies = self._transport.send(self.role, method, plan.arguments)
        return PendingCall(self.role, method, replies, plan, self._transport, self._deadline_seconds)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        methods = self.__dict__.get("_methods", {})  # absent while an object is being copied or unpickled
        if name not in methods:
            problem = f"worker group {self.__dict__.get('role')!r} has no {name!r}"
            raise AttributeError(f"{problem}; it has {', '.join(methods)}")
        return partial(self.call, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._methods]


def closed_error(role: str, method: str, closed_by: WhetError) -> WorkerError:
    """Builds the error for a call after the end of the workers; `closed_by` is the error that ended them."""
    kind = LostWorkerError if isinstance(closed_by, LostWorkerError) else WorkerError
    return kind(f"{role}.{method}", f"the workers are closed ({closed_by})", change=LAUNCH_AGAIN)


def stopped(why: str) -> WorkerError:
    """Builds the error that ends the workers of a launch although none of them failed."""
    return WorkerError("workers", why, change=LAUNCH_AGAIN)
