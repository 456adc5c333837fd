# SPDX-License-Identifier: Apache-2.0
"""A reward process: loads one score function, then answers each task that comes through its socket, in order.

    pool -> worker   WorkerSpec, once; then lists of tasks (pickled items, how many they are)
    worker -> pool   Started or StartFailed, once; then one Answer a task

The socket is a file descriptor of its own: what a user's function prints cannot get into it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from whet.errors import WhetError
from whet.registry import REWARDS
from whet.rewards.adapter import RewardFunction, adapt, describe
from whet.rewards.result import Outcome, failure

ORPHAN_GRACE_SECONDS = 1.0
FOR_EVER = 1e7  # seconds; a timer takes no infinity

# `-c` and not `-m`: the paths must be the parent's before whet is looked for. `python file.py` would put this folder
# first on the path, where math.py stands for the standard library's.
BOOT = "import sys; sys.path[:] = sys.argv[2:]; from whet.rewards.worker import main; main(int(sys.argv[1]))"


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker needs to know: the function, by reference or itself, its options, and the deadline of one item."""

    function: str | Callable[..., Any]
    kwargs: Mapping[str, Any]
    correct_threshold: float
    timeout_seconds: float

    def load(self) -> RewardFunction:
        """The function, imported where it is named.  Raises: RegistryError, RewardError, what the import raises."""
        function = REWARDS[self.function].load() if isinstance(self.function, str) else self.function
        return adapt(function, kwargs=self.kwargs, correct_threshold=self.correct_threshold)


@dataclass(frozen=True)
class Started:
    """The function is loaded, and the worker waits for tasks."""

    takes_batch: bool


@dataclass(frozen=True)
class StartFailed:
    """Why the function cannot be loaded: what whet says of it, else the traceback."""

    why: str


@dataclass(frozen=True)
class Answer:
    """The outcomes of one task, and how long the function took."""

    outcomes: list[Outcome]
    seconds: float


def main(socket: int) -> None:
    """Runs until the pool closes its end of the socket, or dies."""
    del sys.argv[1:]
    os.set_inheritable(socket, False)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with Connection(socket) as connection:
        try:
            _serve(connection)
        except (EOFError, ConnectionError):
            return


def _serve(connection: Connection) -> None:
    try:
        spec: WorkerSpec = pickle.loads(connection.recv_bytes())
        function = spec.load()
    except BaseException as error:  # the user's module runs here; the pool raises what it says
        why = str(error) if isinstance(error, WhetError) else traceback.format_exc()
        connection.send(StartFailed(why))
        return
    connection.send(Started(function.takes_batch))
    while True:
        tasks: list[tuple[bytes, int]] = connection.recv()
        for payload, count in tasks:
            # The pool kills what is late. Where the pool itself was killed, the kernel does it, even inside C code.
            signal.setitimer(signal.ITIMER_REAL, min(spec.timeout_seconds * count + ORPHAN_GRACE_SECONDS, FOR_EVER))
            start = time.perf_counter()
            outcomes = _outcomes(function, payload, count)
            connection.send(Answer(outcomes, time.perf_counter() - start))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _outcomes(function: RewardFunction, payload: bytes, count: int) -> list[Outcome]:
    try:
        items = pickle.loads(payload)
    except Exception as error:  # an object whose class this process cannot import
        return [failure(f"the item cannot be read in the reward process: {describe(error)}")] * count
    return function.score(items)
