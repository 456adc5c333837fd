# SPDX-License-Identifier: Apache-2.0
"""Reward processes, and the one thread that owns them: it hands out tasks, takes outcomes, and replaces workers.

Produces: outcomes, into the request that they belong to. Consumes: tasks, from a queue that any thread may add to.
Waits: for all workers at a time, at most until the nearest deadline. Nobody else touches a worker, so there is no lock
but the queue's.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from whet.errors import RewardError, describe
from whet.processes.children import Children, Event, Gone, Talker
from whet.rewards.adapter import split_calls
from whet.rewards.result import CLOSED, failure
from whet.rewards.worker import Scored, Started
from whet.types import Outcome, RewardItem

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # to import the user's module; one that needs torch on a busy machine takes half a minute
MAX_KILLED_STARTS = 3  # in a row: a process that a signal ends while it starts (out of memory) is replaced before that
# A worker gets several quick tasks at a time: each round costs this thread a turn, and a turn costs up to 5 ms while
# the rest of the program holds the interpreter lock. Tasks behind one that is late wait with it, so they are few.
ROUND_SECONDS = 0.02
MAX_TASKS_PER_ROUND = 8


class _Request:
    """Items whose outcomes are awaited together, in order."""

    def __init__(self, count: int) -> None:
        self.future: Future[list[Outcome]] = Future()
        self.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._outcomes: list[Outcome] = [failure("not scored")] * count
        self._missing = count
        if not count:
            self.future.set_result([])

    def put(self, start: int, outcomes: Sequence[Outcome]) -> None:
        """Outcomes of the items from `start` on; the last ones missing complete the future."""
        self._outcomes[start : start + len(outcomes)] = outcomes
        self._missing -= len(outcomes)
        if not self._missing and not self.future.done():
            self.future.set_result(self._outcomes)

    def fail(self, error: RewardError) -> None:
        """Ends the wait with an error."""
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(frozen=True)
class _Task:
    """The items of one call of the function: `count` of a request, from `start` on."""

    request: _Request
    start: int
    count: int
    content: bytes

    def put(self, outcomes: list[Outcome] | Outcome) -> None:
        """The outcomes, or the one of all items."""
        self.request.put(self.start, outcomes if isinstance(outcomes, list) else [outcomes] * self.count)


class ProcessScorer:
    """Scores in `num_workers` processes, which are ready when the constructor returns. `spec` is a pickled WorkerSpec.

    Raises: RewardError where the function cannot be loaded in a process. Where that is so for a replacement, all that
    is awaited ends with it, and so does every later call.
    """

    def __init__(self, spec: bytes, *, shown_as: str, num_workers: int, timeout_seconds: float) -> None:
        self._shown_as, self._num_workers, self._timeout_seconds = shown_as, num_workers, timeout_seconds
        answers = (Started, Scored, RewardError)
        self._children = Children("whet.rewards.worker:prepare", spec, answers=answers, in_turn=True)
        self._lock = threading.Lock()  # of the queue, and of what ended the thread
        self._queue: deque[_Task] = deque()
        self._ended: RewardError | None = None
        self._ready: dict[Talker, None] = {}  # the workers that have started
        self._sources: dict[str, bytes] = {}  # the user's files that all workers load, by path
        self._killed_starts = 0
        self._task_seconds = ROUND_SECONDS  # running mean; so the first round is of one task
        self._closing = False
        self._owner = os.getpid()
        self._takes_batch: Future[bool] = Future()
        self._thread = threading.Thread(target=self._run, name="whet-rewards", daemon=True)
        self._thread.start()
        try:
            self._takes_batch.result()
        except BaseException:  # Ctrl-C too must not leave processes behind
            self.close()
            raise

    def submit(self, items: Sequence[RewardItem]) -> Future[list[Outcome]]:
        """The outcomes to come, one for each item, in order, for any thread.  Raises: RewardError once closed."""
        request = _Request(len(items))
        tasks = self._make_tasks(request, items)
        with self._lock:
            if self._ended is not None:
                raise RewardError(str(self._ended))
            self._queue.extend(tasks)
            self._children.wake()
        return request.future

    def close(self) -> None:
        """Ends all processes; what is still awaited becomes a RewardError. A forked copy ends nothing."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closing = True
            if self._ended is None:
                self._children.wake()
        if threading.current_thread() is not self._thread:  # the garbage collector may call from there
            self._thread.join()

    def _make_tasks(self, request: _Request, items: Sequence[RewardItem]) -> list[_Task]:
        tasks: list[_Task] = []
        start = 0
        for call in split_calls(items, takes_batch=self._takes_batch.result()):
            try:
                tasks.append(_Task(request, start, len(call), pickle.dumps(call)))
            except Exception as error:  # whatever an object of the user's raises when it is pickled
                request.put(start, [failure(f"cannot be sent to a reward process: {describe(error)}")] * len(call))
            start += len(call)
        return tasks

    def _run(self) -> None:
        ended = RewardError(CLOSED)
        try:
            for _ in range(self._num_workers):
                self._start()
            while not self._closing:
                self._hand_out()
                for event in self._children.poll():
                    self._take(event)
        except RewardError as error:
            ended = error
        except Exception as error:  # nobody else can tell those who wait
            logger.exception("the thread that owns the reward processes cannot go on")
            ended = RewardError(f"the reward pool cannot go on: {describe(error)}")
        self._end(ended)

    def _start(self) -> None:
        self._children.call(self._children.start(), None, pickle.dumps(self._sources), START_SECONDS)

    def _hand_out(self) -> None:
        for worker in [worker for worker in self._ready if not worker.calls]:
            with self._lock:
                share = math.ceil(len(self._queue) / self._num_workers)
                size = min(share, MAX_TASKS_PER_ROUND, max(1, int(ROUND_SECONDS / self._task_seconds)))
                tasks = [self._queue.popleft() for _ in range(size)]
            for task in tasks:
                self._children.call(worker, task, task.content, self._timeout_seconds * task.count)

    def _take(self, event: Event) -> None:
        if isinstance(event, Gone):
            self._replace(event)
        elif isinstance(event.value, RewardError):
            raise RewardError(f"{self._cannot_load}:\n{event.value}")
        elif event.about is None:
            self._take_start(event.child, event.value)
        else:
            self._note_seconds(event.value.seconds)
            event.about.put(event.value.outcomes)

    def _take_start(self, worker: Talker, message: Started) -> None:
        if any(self._sources.get(path, source) != source for path, source in message.sources.items()):
            self._children.kill(worker)  # a file changed between two starts
            self._start()
            return
        self._sources |= message.sources
        self._killed_starts = 0
        self._ready[worker] = None
        if len(self._ready) == self._num_workers and not self._takes_batch.done():
            self._takes_batch.set_result(message.takes_batch)

    def _replace(self, gone: Gone) -> None:
        """Fails the task that runs, puts those behind it back where they were, and starts another process."""
        why = f"the reward process {gone.why}"
        if gone.child not in self._ready:
            self._killed_starts += 1
            if "SIG" not in why or self._killed_starts == MAX_KILLED_STARTS:
                late = f"it was not ready in {START_SECONDS:g} s"
                raise RewardError(f"{self._cannot_load}: {late if gone.is_late else why}")
        elif gone.at_work is None:
            logger.warning("%s, while it had nothing to do; another takes its place", why)
        else:
            if gone.is_late:
                self._note_seconds(self._timeout_seconds)
                why = f"timed out after {self._timeout_seconds * gone.at_work.count:g} s"
            gone.at_work.put(failure(why, timed_out=gone.is_late))
            with self._lock:
                self._queue.extendleft(reversed(gone.waiting))
        self._ready.pop(gone.child, None)
        self._start()

    @property
    def _cannot_load(self) -> str:
        return f"the reward function {self._shown_as} cannot be loaded in its process"

    def _note_seconds(self, seconds: float) -> None:
        self._task_seconds = max(0.9 * self._task_seconds + 0.1 * seconds, 1e-6)

    def _end(self, ended: RewardError) -> None:
        with self._lock:
            self._ended = ended
            waiting = [*self._queue, *(call.about for worker in self._ready for call in worker.calls.values())]
            self._queue.clear()
        for task in waiting:
            task.request.fail(ended)
        if not self._takes_batch.done():
            self._takes_batch.set_exception(ended)
        self._children.close([worker for worker in self._ready if not worker.calls])
