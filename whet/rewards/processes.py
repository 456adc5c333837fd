# SPDX-License-Identifier: Apache-2.0
"""Reward processes, and the thread that owns them. The thread sends tasks, receives outcomes, and replaces workers.

Produces: outcomes, stored in their request. Consumes: tasks, from a queue that any thread may add to. Waits: for all
workers together, at most until the nearest deadline. No other thread touches a worker, so only the queue has a lock."""

from __future__ import annotations

import copy
import logging
import math
import os
import pickle
import reprlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from whet.errors import RewardError, describe
from whet.processes.children import Callee, Children, Ended, Event
from whet.rewards.adapter import split_calls
from whet.rewards.result import closed_error, failure
from whet.rewards.worker import Scored, Started
from whet.types import Outcome, RewardItem

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # to import the user's module; one that needs torch on a busy machine takes half a minute
MAX_KILLED_STARTS = 3  # starts in a row that a signal ended (out of memory); until then the process is replaced
# A worker gets several quick tasks at a time, because in each round this thread waits up to 5 ms for the interpreter
# lock. But only few: tasks queued after a late task wait with it.
ROUND_SECONDS = 0.02
MAX_TASKS_PER_ROUND = 8
GRACE_SECONDS = 0.5  # the process of an async function has this time to cancel a late call; then it is killed
MEMORY_CHECK_SECONDS = 0.1
MAX_DEATHS = 20  # processes in a row that ended while they scored, without a score between them


class _Request:
    """The items of one call of `submit`. One future gets their outcomes, in order, when all are known."""

    def __init__(self, count: int) -> None:
        self.future: Future[list[Outcome]] = Future()
        self.future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        self._outcomes: list[Outcome] = [failure("not scored")] * count
        self._missing = count
        if not count:
            self.future.set_result([])

    def put(self, start: int, outcomes: Sequence[Outcome]) -> None:
        """Stores the outcomes of the items from number `start` on. The last missing outcomes complete the future."""
        self._outcomes[start : start + len(outcomes)] = outcomes
        self._missing -= len(outcomes)
        if not self._missing and not self.future.done():
            self.future.set_result(self._outcomes)

    def fail(self, error: RewardError) -> None:
        """Completes the future with an error."""
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(frozen=True)
class _Task:
    """The pickled items of one call of the function. They are `count` items of a request, from number `start` on."""

    request: _Request
    start: int
    count: int
    content: bytes
    is_alone: bool = False  # score without other tasks, because this or another task ended its process or made it hang

    @property
    def shown(self) -> str:
        """The beginning of the task's first response, for errors."""
        return reprlib.repr(pickle.loads(self.content)[0].solution_str)

    def put(self, outcomes: list[Outcome] | Outcome) -> None:
        """Stores an outcome for each item, or one outcome for all."""
        self.request.put(self.start, outcomes if isinstance(outcomes, list) else [outcomes] * self.count)


@dataclass
class _Worker:
    """A started process: its number of finished calls, and the process id of its guard, which is the ancestor of the
    worker and of all processes that it starts."""

    guard: int
    served: int = 0


class ProcessScorer:
    """Scores in `num_workers` processes, which are ready when the constructor returns. `spec` is a pickled ScorerSpec.

    If a process ends or hangs during several calls, any of them may be the cause: each is scored again alone. A process
    is killed if it and its children use more than `memory_limit_mb`; a call that is not the first of its process is
    scored again, since earlier calls may hold the memory. Memory in use is measured from outside: a limit of addresses
    (RLIMIT_AS) also counts memory that libraries only reserve, and raises an error that the function can catch.

    Raises: RewardError if a process cannot load the function. If a replacement cannot load it, all pending and later
    calls raise that error."""

    def __init__(
        self,
        spec: bytes,
        *,
        shown_as: str,
        num_workers: int,
        timeout_seconds: float,
        memory_limit_mb: float | None = None,
        seconds_between_calls: float = 0.0,
    ) -> None:
        self._shown_as, self._num_workers, self._timeout_seconds = shown_as, num_workers, timeout_seconds
        self._memory_limit_mb, self._seconds_between_calls = memory_limit_mb, seconds_between_calls
        self._next_call = -math.inf  # value of time.monotonic() from which the rate limit allows the next call
        self._waits_for_limit = False
        replies = (Started, Scored, RewardError)
        self._children = Children("whet.rewards.worker:prepare", spec, replies=replies, in_turn=True, name="reward")
        self._lock = threading.Lock()  # protects _queue and _ended
        self._queue: deque[_Task] = deque()
        self._ended: RewardError | None = None
        self._ready: dict[Callee, _Worker] = {}
        self._concurrency = 1  # number of calls that a worker serves at a time; its first reply has it
        self._deaths = 0
        self._next_memory_check = 0.0
        self._sources: dict[str, bytes] = {}  # the user's files that all workers load, by path
        self._killed_starts = 0
        self._task_seconds = ROUND_SECONDS  # running mean; with this first value the first round has one task
        self._closing = False
        self._owner = os.getpid()
        self._takes_batch: Future[bool] = Future()
        self._thread = threading.Thread(target=self._run, name="whet-rewards", daemon=True)
        self._thread.start()
        try:
            self.scores_alone = not self._takes_batch.result()
        except BaseException:  # Ctrl-C must not leave processes behind either
            self.close()
            raise

    def submit(self, items: Sequence[RewardItem]) -> Future[list[Outcome]]:
        """Returns a future with the outcome of each item, in order; any thread may call.  Raises: RewardError once
        closed."""
        request = _Request(len(items))
        tasks = self._make_tasks(request, items)
        with self._lock:
            if self._ended is not None:
                raise copy.copy(self._ended)
            self._queue.extend(tasks)
            self._children.wake()
        return request.future

    def close(self) -> None:
        """Ends all processes. Pending results raise RewardError. Does nothing in a forked copy of this process."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closing = True
            if self._ended is None:
                self._children.wake()
        if threading.current_thread() is not self._thread:  # the garbage collector may call `close` in `_thread`
            self._thread.join()

    def _make_tasks(self, request: _Request, items: Sequence[RewardItem]) -> list[_Task]:
        tasks: list[_Task] = []
        start = 0
        for call in split_calls(items, takes_batch=self._takes_batch.result()):
            try:
                tasks.append(_Task(request, start, len(call), pickle.dumps(call)))
            except Exception as error:  # pickling an object of the user may raise anything
                request.put(start, [failure(f"cannot be sent to a reward process: {describe(error)}")] * len(call))
            start += len(call)
        return tasks

    def _run(self) -> None:
        ended = closed_error()
        try:
            for _ in range(self._num_workers):
                self._start()
            while not self._closing:
                self._send_tasks()
                for event in self._children.poll(self._patience()):
                    self._handle(event)
                self._check_memory()
        except RewardError as error:
            ended = error
        except Exception as error:  # the threads that wait for results get this error
            logger.exception("the thread that owns the reward processes failed, and ends")
            ended = RewardError("reward pool", describe(error), "", "report this error of whet, with the log")
        self._end(ended)

    def _start(self) -> None:
        self._children.call(self._children.start(), None, pickle.dumps(self._sources), START_SECONDS)

    def _patience(self) -> float:
        """The longest time to wait for events, in seconds: until the next measurement of memory is due, or the rate
        limit allows the next call."""
        until_call = max(0.0, self._next_call - time.monotonic()) if self._waits_for_limit else math.inf
        return until_call if self._memory_limit_mb is None else min(until_call, MEMORY_CHECK_SECONDS)

    def _may_call(self) -> bool:
        """Tells whether the rate limit allows a call now. If so, records that the call begins now."""
        now = time.monotonic()
        self._waits_for_limit = now < self._next_call
        if not self._waits_for_limit:
            self._next_call = now + self._seconds_between_calls
        return not self._waits_for_limit

    def _send_tasks(self) -> None:
        self._waits_for_limit = False
        if self._concurrency > 1:
            self._send_concurrently()
            return
        for worker in [worker for worker in self._ready if not worker.calls]:
            with self._lock:
                even = math.ceil(len(self._queue) / self._num_workers)
                size = min(even, MAX_TASKS_PER_ROUND, max(1, int(ROUND_SECONDS / self._task_seconds)))
                if self._seconds_between_calls:
                    size = min(size, 1) if self._queue and self._may_call() else 0
                tasks = [self._queue.popleft() for _ in range(size)]
            for task in tasks:
                self._children.call(worker, task, task.content, self._timeout_seconds * task.count)

    def _send_concurrently(self) -> None:
        """Sends tasks to workers, evenly. A task with `is_alone` waits for a worker without calls."""
        while self._ready:
            free = [each for each in self._ready if not any(call.task.is_alone for call in each.calls.values())]
            worker = min(free, key=lambda each: len(each.calls), default=None)
            with self._lock:
                if worker is None or not self._queue:
                    return
                if len(worker.calls) >= (1 if self._queue[0].is_alone else self._concurrency):
                    return
                if self._seconds_between_calls and not self._may_call():
                    return
                task = self._queue.popleft()
            self._children.call(worker, task, task.content, self._timeout_seconds + GRACE_SECONDS)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Ended):
            self._replace(event)
        elif isinstance(event.value, RewardError):
            raise event.value.at(self._loading)
        elif event.task is None:
            self._handle_start(event.child, event.value)
        else:
            self._note_seconds(event.value.seconds)
            self._ready[event.child].served += 1
            self._deaths = 0
            if event.value.outcomes is not None:
                event.task.put(event.value.outcomes)
            elif event.task.is_alone:
                event.task.put(failure(f"timed out after {self._timeout_seconds:g} s", timed_out=True))
            else:
                self._score_alone([event.task])

    def _handle_start(self, worker: Callee, message: Started) -> None:
        if any(self._sources.get(path, source) != source for path, source in message.sources.items()):
            self._children.kill(worker)  # a file changed between two starts
            self._start()
            return
        self._sources |= message.sources
        self._killed_starts = 0
        self._ready[worker] = _Worker(message.guard)
        self._concurrency, self._children.in_turn = message.concurrency, message.concurrency == 1
        if len(self._ready) == self._num_workers and not self._takes_batch.done():
            self._takes_batch.set_result(message.takes_batch)

    def _replace(self, ended: Ended) -> None:
        """Fails the running task of a process that ended, requeues its waiting tasks, and starts another process."""
        why = f"the reward process {ended.why}"
        if ended.child not in self._ready:
            self._killed_starts += 1
            if "SIG" not in why or self._killed_starts == MAX_KILLED_STARTS:
                why = f"not ready in {START_SECONDS:g} s" if ended.is_late else why
                raise RewardError(self._loading, why, "a process that imports it")
        elif ended.running is None:
            logger.warning("%s while idle; another process replaces it", why)
        elif ended.waiting and self._concurrency > 1:
            self._score_alone([ended.running, *ended.waiting])
        else:
            if ended.is_late:
                self._note_seconds(self._timeout_seconds)
                why = f"timed out after {self._timeout_seconds * ended.running.count:g} s"
            self._fail(ended.running, why, is_late=ended.is_late)
            self._put_back(ended.waiting)
        self._ready.pop(ended.child, None)
        self._start()

    def _fail(self, task: _Task, why: str, *, is_late: bool = False) -> None:
        """Fails a task that ended its process.  Raises: RewardError after `MAX_DEATHS` such tasks in a row."""
        task.put(failure(why, timed_out=is_late))
        self._deaths += not is_late
        if self._deaths == MAX_DEATHS:
            found = (
                f"{MAX_DEATHS} processes in a row ended while scoring, the last for the response {task.shown}: {why}"
            )
            change = "correct the function, or give it the memory that it needs"
            raise RewardError(f"reward function {self._shown_as}", found, "a score of some response", change)

    def _score_alone(self, tasks: Sequence[_Task]) -> None:
        self._put_back([replace(task, is_alone=True) for task in tasks])

    def _put_back(self, tasks: Sequence[_Task]) -> None:
        with self._lock:
            self._queue.extendleft(reversed(tasks))

    def _check_memory(self) -> None:
        """Replaces the workers that use more memory than the limit."""
        if self._memory_limit_mb is None or time.monotonic() < self._next_memory_check:
            return
        self._next_memory_check = time.monotonic() + MEMORY_CHECK_SECONDS
        for worker, state in list(self._ready.items()):
            used_mb = memory_below(state.guard, self._memory_limit_mb * 2**20) / 2**20
            if used_mb <= self._memory_limit_mb:
                continue
            limit = f"reward.memory_limit_mb={self._memory_limit_mb:g}"
            why = f"the reward process used {used_mb:.0f} MB, more than {limit}"
            tasks = [call.task for call in worker.calls.values()]
            self._children.kill(worker)
            del self._ready[worker]
            if not tasks:
                logger.warning("%s, while idle; another process replaces it", why)
            elif (state.served or len(tasks) > 1) and not tasks[0].is_alone:
                first, *others = tasks
                self._score_alone(tasks if self._concurrency > 1 else [first])
                self._put_back(others if self._concurrency == 1 else [])
            else:
                self._fail(tasks[0], f"{why}, and was killed")
                self._put_back(tasks[1:])
            self._start()

    @property
    def _loading(self) -> str:
        return f"loading the reward function {self._shown_as} in a process"

    def _note_seconds(self, seconds: float) -> None:
        self._task_seconds = max(0.9 * self._task_seconds + 0.1 * seconds, 1e-6)

    def _end(self, ended: RewardError) -> None:
        with self._lock:
            self._ended = ended
            waiting = [*self._queue, *(call.task for worker in self._ready for call in worker.calls.values())]
            self._queue.clear()
        for task in waiting:
            task.request.fail(ended)
        if not self._takes_batch.done():
            self._takes_batch.set_exception(ended)
        self._children.close([worker for worker in self._ready if not worker.calls])


def memory_below(pid: int, limit_bytes: float) -> int:
    """Sums the resident memory of the processes below `pid`, in bytes.

    If the sum for several processes is above the limit, it is computed again, slowly, with each shared page once."""
    pids = [*_below(pid)]
    resident = sum(_kilobytes(each, "status", "VmRSS:") for each in pids) * 1024
    if resident <= limit_bytes or len(pids) == 1:
        return resident
    return sum(_kilobytes(each, "smaps_rollup", "Pss:") or _kilobytes(each, "status", "VmRSS:") for each in pids) * 1024


def _below(pid: int) -> Iterator[int]:
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from _below(child)


def _kilobytes(pid: int, file: str, name: str) -> int:
    """Reads the number `name` in a process's /proc file, in KiB; 0 if it has ended or belongs to another user."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
    return 0
