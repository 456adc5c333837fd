# SPDX-License-Identifier: Apache-2.0
"""Reward processes, and the one thread that owns them: it hands out tasks, reads answers, kills and replaces workers.

Produces: outcomes, into the request that they belong to. Consumes: tasks, from a queue that any thread may add to.
Waits: on the sockets of all workers, at most until the nearest deadline. Nobody else touches a worker, so there is no
lock but the queue's.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from whet.errors import RewardError
from whet.rewards.adapter import RewardItem, describe, split_calls
from whet.rewards.result import Outcome, failure
from whet.rewards.worker import BOOT, Answer, Started, StartFailed

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # to import the user's module; one that needs torch on a busy machine takes half a minute
STALL_SECONDS = 30  # for a worker that reads or writes a message to get on with it
CLOSE_SECONDS = 1.0  # for idle workers to leave by themselves, so that a user's open files are flushed
MAX_TURN_SECONDS = 1.0  # how soon a death is seen where a forked grandchild keeps the socket open
# Quick tasks go several to a message: each message costs this thread a turn, and a turn costs up to 5 ms while the rest
# of the program holds the interpreter lock. Tasks behind one that is late wait with it, so messages stay short.
MESSAGE_SECONDS = 0.02
MAX_TASKS_PER_MESSAGE = 8


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
    """What one call of the function judges: `count` items of a request, from `start` on."""

    request: _Request
    start: int
    count: int
    payload: bytes

    def fail(self, message: str, *, timed_out: bool) -> None:
        self.request.put(self.start, [failure(message, timed_out=timed_out)] * self.count)


class _Worker:
    """One process, the pool's end of its socket, and the tasks that it has, the first of which is running."""

    def __init__(self, spec: bytes, folder: Path) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_SECONDS, 0))
            self.connection = Connection(ours.detach())
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", BOOT, str(theirs.fileno()), *(path or str(folder) for path in sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                cwd=folder,
                start_new_session=True,  # Ctrl-C is the pool's affair; and what the function started is killed with it
            )
        self.running: deque[_Task] = deque()
        self.started = False
        self.since = time.monotonic()
        self._send(spec)

    def give(self, tasks: Sequence[_Task]) -> None:
        """Has it run these tasks, which are all that it has."""
        self.running.extend(tasks)
        self.since = time.monotonic()
        self._send(pickle.dumps([(task.payload, task.count) for task in tasks]))

    def deadline(self, timeout_seconds: float) -> float:
        """When what it does now must be done; infinity while it does nothing."""
        if not self.started:
            return self.since + START_SECONDS
        return self.since + timeout_seconds * self.running[0].count if self.running else math.inf

    def kill(self) -> str:
        """Ends it and all that it started.  Returns how it ended, as a user would say it."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            code = self.process.wait(timeout=CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return "does not end on SIGKILL"
        if code == -signal.SIGKILL:
            return "SIGKILL (out of memory, or killed by hand)"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):  # its socket or its deadline tells of a worker that died or stopped
            self.connection.send_bytes(message)


class ProcessScorer:
    """Scores in `num_workers` processes, which are ready when the constructor returns. `spec` is a pickled WorkerSpec.

    Raises: RewardError where the function cannot be loaded in a process. Where that is so for a replacement, all that
    is awaited ends with it, and so does every later call.
    """

    def __init__(self, spec: bytes, *, shown_as: str, num_workers: int, timeout_seconds: float) -> None:
        self._spec, self._shown_as, self._folder = spec, shown_as, Path.cwd()
        self._num_workers, self._timeout_seconds = num_workers, timeout_seconds
        self._lock = threading.Lock()  # of the queue, of what ended the thread, and of the pipe that wakes it
        self._queue: deque[_Task] = deque()
        self._ended: RewardError | None = None
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        self._workers: list[_Worker] = []
        self._task_seconds = MESSAGE_SECONDS  # running mean; so the first message carries one task
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
            self._wake()
        return request.future

    def close(self) -> None:
        """Ends all processes; what is still awaited becomes a RewardError. A forked copy ends nothing."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._closing = True
            if self._ended is None:
                self._wake()
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

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # so full of calls that it will wake anyway
            os.write(self._wake_writer, b"\0")

    def _run(self) -> None:
        ended = RewardError("the reward pool is closed")
        try:
            for _ in range(self._num_workers):
                self._workers.append(_Worker(self._spec, self._folder))
            while not self._closing:
                self._turn()
        except RewardError as error:
            ended = error
        except Exception as error:  # nobody else can tell those who wait
            logger.exception("the thread that owns the reward processes cannot go on")
            ended = RewardError(f"the reward pool cannot go on: {describe(error)}")
        self._end(ended)

    def _turn(self) -> None:
        self._hand_out()
        nearest = min(worker.deadline(self._timeout_seconds) for worker in self._workers)
        timeout = min(max(nearest - time.monotonic(), 0.0), MAX_TURN_SECONDS)
        ready = wait([self._wake_reader, *(worker.connection for worker in self._workers)], timeout)
        if self._wake_reader in ready:
            os.read(self._wake_reader, 65536)
        for worker in list(self._workers):
            if worker.connection in ready:
                self._receive(worker)
        self._replace_late()
        if not ready:
            self._replace_dead()

    def _hand_out(self) -> None:
        free = [worker for worker in self._workers if worker.started and not worker.running]
        for worker in free:
            with self._lock:
                share = math.ceil(len(self._queue) / self._num_workers)
                size = min(share, MAX_TASKS_PER_MESSAGE, max(1, int(MESSAGE_SECONDS / self._task_seconds)))
                tasks = [self._queue.popleft() for _ in range(size)]
            if tasks:
                worker.give(tasks)

    def _receive(self, worker: _Worker) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            self._replace(worker)
            return
        if isinstance(message, StartFailed):
            raise RewardError(f"the reward function {self._shown_as} cannot be loaded in its process:\n{message.why}")
        if isinstance(message, Started):
            worker.started = True
            if all(each.started for each in self._workers) and not self._takes_batch.done():
                self._takes_batch.set_result(message.takes_batch)
        elif isinstance(message, Answer):
            task = worker.running.popleft()
            worker.since = time.monotonic()
            self._note_seconds(message.seconds)
            task.request.put(task.start, message.outcomes)

    def _replace_late(self) -> None:
        for worker in list(self._workers):
            late = time.monotonic() > worker.deadline(self._timeout_seconds)
            if late and not worker.connection.poll():  # an answer that came in time counts, however late it is read
                if worker.running:
                    self._note_seconds(self._timeout_seconds)
                    self._replace(worker, f"timed out after {self._timeout_seconds * worker.running[0].count:g} s")
                else:
                    self._replace(worker, f"it was not ready in {START_SECONDS:g} s")

    def _replace_dead(self) -> None:
        for worker in list(self._workers):
            if worker.process.poll() is not None and not worker.connection.poll():
                self._replace(worker)

    def _replace(self, worker: _Worker, late: str | None = None) -> None:
        """Fails the task that runs, puts those behind it back where they were, and starts another process."""
        ended = worker.kill()
        why = late or f"the reward process died: {ended}"
        if not worker.started:
            raise RewardError(f"the reward function {self._shown_as} cannot be loaded in its process: {why}")
        if worker.running:
            worker.running.popleft().fail(why, timed_out=late is not None)
            with self._lock:
                self._queue.extendleft(reversed(worker.running))
        else:
            logger.warning("%s, while it had nothing to do; another takes its place", why)
        self._workers[self._workers.index(worker)] = _Worker(self._spec, self._folder)

    def _note_seconds(self, seconds: float) -> None:
        self._task_seconds = max(0.9 * self._task_seconds + 0.1 * seconds, 1e-6)

    def _end(self, ended: RewardError) -> None:
        with self._lock:
            self._ended = ended
            waiting = [*self._queue, *(task for worker in self._workers for task in worker.running)]
            self._queue.clear()
            os.close(self._wake_reader)
            os.close(self._wake_writer)
        for task in waiting:
            task.request.fail(ended)
        if not self._takes_batch.done():
            self._takes_batch.set_exception(ended)
        idle = [worker for worker in self._workers if worker.started and not worker.running]
        for worker in idle:
            worker.connection.close()  # asks it to leave
        give_up = time.monotonic() + CLOSE_SECONDS
        for worker in idle:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, give_up - time.monotonic()))
            worker.kill()
        for worker in self._workers:
            if worker not in idle:
                worker.kill()
