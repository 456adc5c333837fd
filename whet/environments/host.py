# SPDX-License-Identifier: Apache-2.0
"""Hosts run environments. `start`, `step` and `close` never wait; `poll` returns their results.

An environment registered with `pure=True` (it only computes and cannot hang) runs in the caller. All others run in
processes forked from one that has loaded their class: one process for each episode, or one for all episodes of an async
environment registered with `shared=True`. An environment that hangs, dies, raises or returns an invalid observation
fails only its own episode."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import pickle
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from whet.environments.protocol import Answer, Observation
from whet.environments.running import PROBE, EnvironmentSpec, Outcome, Refusal, Running, at_once
from whet.environments.toolbox import Loads, Tools
from whet.errors import ConfigError, describe
from whet.processes.children import Callee, Children, Ended, Event
from whet.processes.user_code import pickle_code
from whet.registry import ENVIRONMENTS
from whet.types import Failure, Prompt

log = logging.getLogger(__name__)

Result = tuple[str, Outcome]  # result of `start` or `step`: the episode's id, and an Observation or a Failure
POLL_SECONDS = 0.05
MAX_PROCESSES = 256
MAX_SPARES = 64  # processes that wait for an episode, each of some 4 MB
MAX_STARTS = 2 * (os.cpu_count() or 1)  # resets at a time, if each starts a program, such as an MCP server


@dataclass(frozen=True)
class Deadlines:
    """Time limits in seconds for one call of an environment, from the call on. They include the start of a process."""

    reset: float = 120.0
    step: float = 60.0
    close: float = 5.0

    def of(self, verb: str) -> float:
        """Returns the seconds for "reset", "step" or "close"."""
        return {"reset": self.reset, "step": self.step, "close": self.close}[verb]


class EnvironmentHost(ABC):
    """Runs the environments of many episodes. The id of an episode may be reused after `close`."""

    def __init__(self) -> None:
        self._results: list[Result] = []
        self._begun = dict[str, None]()

    @abstractmethod
    def start(self, uid: str, prompt: Prompt, seed: int) -> None:
        """Creates and resets the environment of a new episode, or does so later if too many episodes run now."""

    @abstractmethod
    def step(self, uid: str, answer: Answer) -> None:
        """Passes a turn to an episode's environment. The last result of the episode must have arrived before."""

    @abstractmethod
    def close(self, uid: str) -> None:
        """Ends an episode at any time, without a result. Must be called for every started episode."""

    @abstractmethod
    def shutdown(self) -> None:
        """Closes all episodes and ends their processes."""

    def poll(self, timeout_seconds: float) -> list[Result]:
        """Waits for results, up to `timeout_seconds`.  Returns the results since the last call."""
        results, self._results = self._results, []
        return results

    def begun(self) -> list[str]:
        """Returns ids of episodes whose reset began since the last call, in order. Replayed episodes appear again."""
        begun, self._begun = self._begun, {}
        return [*begun]

    def refusal(self) -> ConfigError | None:
        """Creates an environment once, to test its options.  Returns the error if it refuses its options. None if it
        accepts them, or fails for another reason, which may depend on the prompt."""
        self.start(PROBE.uid, PROBE, 0)
        while not (results := self.poll(POLL_SECONDS)):
            pass
        self.close(PROBE.uid)
        return next((outcome.error for _, outcome in results if isinstance(outcome, Refusal)), None)

    def _forget(self, uid: str) -> None:
        self._results = [result for result in self._results if result[0] != uid]
        self._begun.pop(uid, None)


def open_host(
    environment: str,
    options: Mapping[str, Any] | None = None,
    *,
    tools: Tools | None = None,
    deadlines: Deadlines | None = None,
    max_episodes: int | None = None,
) -> EnvironmentHost:
    """Opens the host of an environment (a registered name or a path) with `tools` around it. Call it before a model is
    loaded. At most `max_episodes` run at a time; None: `MAX_PROCESSES` if each has a process, else no limit.

    Raises: RegistryError, ConfigError for an option that the environment does not have, any error of the import."""
    entry = ENVIRONMENTS[environment]
    resolved = entry.resolve_options(options or {}, "environment.options")
    target = environment if ":" in environment else entry.function or environment
    inner = EnvironmentSpec(target, resolved)
    spec: Loads = inner if tools is None else tools.around(inner)
    if tools is None and entry.marks.get("pure"):
        return InlineHost(spec, at_once, max_episodes)
    try:
        code = pickle_code(spec, target)
    except Exception as error:  # pickling an object that the class holds may raise anything
        log.warning(
            "environment %s does not pickle (%s), so it runs in this process, without deadlines. Name it as "
            "package.module:Class or path/file.py:Class to run it in processes",
            environment,
            describe(error),
        )
        return InlineHost(spec, asyncio.Runner().run, max_episodes)
    is_shared = bool(entry.marks.get("shared")) and tools is None
    most = max_episodes if max_episodes or is_shared else MAX_PROCESSES
    starts = MAX_STARTS if tools is not None and tools.starts_servers else None
    return ProcessHost(code, deadlines or Deadlines(), most, is_shared=is_shared, max_starts=starts)


class InlineHost(EnvironmentHost):
    """Runs environments in the caller's thread, so a result is ready when the call returns. If `most` episodes run, a
    new episode starts when another one closes."""

    def __init__(self, spec: Loads, run: Callable[[Coroutine[Any, Any, Outcome]], Outcome], most: int | None) -> None:
        super().__init__()
        self._make, self._run = spec.load(), run
        self._most = most or math.inf
        self._open: dict[str, Running] = {}
        self._queue: dict[str, tuple[Prompt, int]] = {}

    def start(self, uid: str, prompt: Prompt, seed: int) -> None:
        if len(self._open) >= self._most:
            self._queue[uid] = prompt, seed
            return
        self._open[uid] = Running(self._make)
        self._begun[uid] = None
        self._results.append((uid, self._run(self._open[uid].call("reset", prompt, seed))))

    def step(self, uid: str, answer: Answer) -> None:
        self._results.append((uid, self._run(self._open[uid].call("step", answer))))

    def close(self, uid: str) -> None:
        self._queue.pop(uid, None)
        if (running := self._open.pop(uid, None)) is not None:
            self._forget(uid)
            if running.needs_close:
                _note_close(uid, self._run(running.call("close")))
            if self._queue:
                first = next(iter(self._queue))
                self.start(first, *self._queue.pop(first))

    def shutdown(self) -> None:
        for uid in [*self._queue, *self._open]:
            self.close(uid)


@dataclass(eq=False)
class _Episode:
    uid: str
    number: int
    prompt: Prompt
    seed: int
    turns: list[Answer] = field(default_factory=list)  # for a replay
    child: Callee | None = None  # None while it waits for a process, and after that has ended
    is_awaited: bool = True  # the result of its last call has not been added yet
    failure: Failure | None = None  # of its process, or of a replay


@dataclass(frozen=True)
class _Call:
    episode: _Episode
    verb: str
    is_awaited: bool  # False in a replay, where the result is known already


class ProcessHost(EnvironmentHost):
    """Runs environments in processes: one for each episode, or one shared by all. At most `max_episodes` run at a time,
    and at most `max_starts` of them may be in their reset; later episodes wait. If a shared process dies, the episode
    whose call was running fails; the others are replayed: a new process repeats their calls. When an episode closes,
    the host forks a process for a later one, because 32 forks take seconds on a busy machine, and resets would wait for
    them. One thread owns the host, which waits only in `poll`."""

    def __init__(
        self, code: bytes, deadlines: Deadlines, max_episodes: int | None, *, is_shared: bool, max_starts: int | None
    ) -> None:
        super().__init__()
        argument = pickle.dumps((code, is_shared))
        self._children = Children(
            "whet.environments.running:prepare", argument, replies=(Observation, Failure), name="env"
        )
        self._end = weakref.finalize(self, self._children.close)  # at the latest when the interpreter ends
        self._deadlines, self._is_shared = deadlines, is_shared
        self._most = max_episodes or math.inf
        self._taken: dict[int, Callee] = {}  # the process of each episode that has not closed, by number
        self._spares: list[Callee] = []  # processes without an episode yet
        self._most_taken = 0  # most episodes at a time so far, a limit of the processes forked ahead
        self._starting = set[int]()  # numbers of the episodes that are in their reset
        self._most_starts = max_starts or math.inf
        self._numbers = count(1)
        self._open: dict[str, _Episode] = {}
        self._queue: deque[_Episode] = deque()

    def start(self, uid: str, prompt: Prompt, seed: int) -> None:
        self._open[uid] = _Episode(uid, next(self._numbers), prompt, seed)
        self._queue.append(self._open[uid])
        self._assign_processes()

    def step(self, uid: str, answer: Answer) -> None:
        episode = self._open[uid]
        episode.is_awaited = True
        if episode.failure is not None:
            self._add_result(episode, episode.failure)
            return
        if self._is_shared:
            episode.turns.append(answer)
        self._call(episode, "step", answer)

    def close(self, uid: str) -> None:
        episode = self._open.pop(uid, None)
        if episode is None:
            return
        self._forget(uid)
        if episode in self._queue:
            self._queue.remove(episode)
        elif episode.child is not None:
            self._call(episode, "close")

    def poll(self, timeout_seconds: float) -> list[Result]:
        until = time.monotonic() + timeout_seconds
        while True:
            for event in self._children.poll(0.0 if self._results else max(0.0, until - time.monotonic())):
                self._handle(event)
            if self._results or time.monotonic() >= until:
                return super().poll(0.0)

    def shutdown(self) -> None:
        for uid in list(self._open):
            self.close(uid)
        while self._end.alive and any(child.calls for child in self._children.running):
            self.poll(POLL_SECONDS)
        self._end()

    def _assign_processes(self) -> None:
        """Assigns processes to waiting episodes, up to the limits. Repeats the calls of a replayed episode."""
        while self._queue and len(self._taken) < self._most and len(self._starting) < self._most_starts:
            episode = self._queue.popleft()
            self._starting.add(episode.number)
            self._begun[episode.uid] = None
            shared = next(iter(self._children.running), None) if self._is_shared else None
            spare = self._spares.pop(0) if self._spares else None
            episode.child = self._taken[episode.number] = shared or spare or self._children.start()
            self._most_taken = max(self._most_taken, len(self._taken))
            steps = [("step", turn) for turn in episode.turns]
            *before, last = [("reset", episode.prompt, episode.seed), *steps]
            for call in before:
                self._call(episode, *call, is_awaited=False)
            self._call(episode, *last, is_awaited=episode.is_awaited)

    def _call(self, episode: _Episode, verb: str, *arguments: Any, is_awaited: bool = True) -> None:
        assert episode.child is not None
        try:
            content = pickle.dumps((verb, episode.number, arguments))
        except Exception as error:  # pickling an object of the user may raise anything
            what = f"the prompt cannot be sent to the environment's process: {describe(error)}"
            self._add_result(episode, Failure("environment", what))
            return
        self._children.call(episode.child, _Call(episode, verb, is_awaited), content, self._deadlines.of(verb))

    def _add_result(self, episode: _Episode, outcome: Outcome) -> None:
        """Adds a result unless the episode has been closed."""
        episode.is_awaited = False
        if self._open.get(episode.uid) is episode:
            self._results.append((episode.uid, outcome))

    def _handle(self, event: Event) -> None:
        if isinstance(event, Ended):
            self._handle_end(event)
            return
        call, outcome = event.task, event.value
        if call.verb == "reset":
            self._starting.discard(call.episode.number)
            self._assign_processes()
        if call.verb == "close":
            _note_close(call.episode.uid, outcome)
            if not self._is_shared:
                self._children.kill(event.child)
            self._taken.pop(call.episode.number, None)
            self._assign_processes()
            most = min(self._most_taken - len(self._taken), MAX_SPARES)
            if not self._is_shared and len(self._spares) < most:
                self._spares.append(self._children.start())
        elif call.is_awaited:
            self._add_result(call.episode, call.episode.failure or outcome)
        elif isinstance(outcome, Failure):
            call.episode.failure = outcome

    def _handle_end(self, ended: Ended) -> None:
        """Handles the end of a process: fails the episode that was in a call, queues the others for a replay."""
        self._spares = [child for child in self._spares if child is not ended.child]
        running, what = ended.running, f"the environment's process {ended.why}"
        if running is not None and ended.is_late:
            what = f"{running.verb} took longer than {self._deadlines.of(running.verb):g} s; its process was killed"
        failure = Failure("environment", what, timed_out=ended.is_late)
        self._taken = {number: child for number, child in self._taken.items() if child is not ended.child}
        self._starting &= self._taken.keys()
        if running is not None and running.verb == "close":
            _note_close(running.episode.uid, failure)
        again = list[_Episode]()
        for episode in [episode for episode in self._open.values() if episode.child is ended.child]:
            episode.child = None
            if self._is_shared and (running is None or episode is not running.episode):
                again.append(episode)
                continue
            episode.failure = failure
            if episode.is_awaited:
                self._add_result(episode, failure)
        if again:
            log.warning("%s; %d other episodes are replayed", what, len(again))
            self._queue.extendleft(reversed(again))
        self._assign_processes()


def _note_close(uid: str, outcome: Outcome) -> None:
    if isinstance(outcome, Failure):
        log.warning("closing the environment of %s failed: %s", uid, outcome.message)
