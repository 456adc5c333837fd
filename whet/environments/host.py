# SPDX-License-Identifier: Apache-2.0
"""The place where environments run: `start`, `step` and `close` never wait, and `poll` gives what came of them.

An environment registered with `pure=True` (it computes, and cannot hang) runs in the caller. All others run in
processes forked from one that has loaded their class: a process an episode, or, for async ones registered with
`shared=True`, one for all. What hangs, dies, raises or answers wrongly fails its own episode.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from whet.environments.protocol import Answer, Observation, Resets, read_observation
from whet.environments.running import EnvironmentSpec, Outcome, Running
from whet.errors import describe
from whet.processes.children import BROKEN, Children, Event, Said, Talker
from whet.processes.user_code import pickle_code
from whet.registry import ENVIRONMENTS
from whet.types import Failure, Prompt

log = logging.getLogger(__name__)

Result = tuple[str, Outcome]  # of a start or a step: the episode's id, and an Observation or a Failure
POLL_SECONDS = 0.05
GOES_ON = Observation(done=False)


@dataclass(frozen=True)
class Deadlines:
    """Seconds for one call of an environment. Each counts from the call, the start of a process included."""

    reset: float = 120.0
    step: float = 60.0
    close: float = 5.0

    def of(self, verb: str) -> float:
        """The seconds for "reset", "step" or "close"."""
        return {"reset": self.reset, "step": self.step, "close": self.close}[verb]


class EnvironmentHost(Protocol):
    """Environments of episodes. An id is free again once its episode is closed."""

    def start(self, uid: str, prompt: Prompt, seed: int) -> None:
        """Makes and resets the environment of a new episode."""
        ...

    def step(self, uid: str, answer: Answer) -> None:
        """Gives a response to the environment of an episode, whose last result is there."""
        ...

    def close(self, uid: str) -> None:
        """Ends an episode, at any time; no result follows. To be called for each that was started."""
        ...

    def poll(self, timeout_seconds: float) -> list[Result]:
        """The results since the last call, as soon as there are any, at the latest after `timeout_seconds`."""
        ...

    def shutdown(self) -> None:
        """Closes all episodes and ends their processes."""
        ...


def open_host(
    environment: str,
    options: Mapping[str, Any] | None = None,
    *,
    deadlines: Deadlines | None = None,
    max_processes: int = 256,
) -> EnvironmentHost:
    """The host of one environment, a registered name or a path. Open it before a model is loaded.

    Raises: RegistryError, ConfigError for an option that it does not have, what an import raises."""
    entry = ENVIRONMENTS[environment]
    resolved = entry.resolve_options(options or {}, "environment.options")
    target = environment if ":" in environment else entry.function or environment
    spec = EnvironmentSpec(target, resolved)
    if entry.marks.get("pure"):
        return PureHost(spec)
    try:
        code = pickle_code(spec, target)
    except Exception as error:  # whatever an object that the class holds raises when it is pickled
        log.warning(
            "environment %s cannot be sent to a process (%s); it runs in this one, without deadlines. Name it as "
            "package.module:Class or path/file.py:Class to have it in processes",
            environment,
            describe(error),
        )
        return InlineHost(spec, asyncio.Runner().run)
    return ProcessHost(code, deadlines or Deadlines(), max_processes, is_shared=bool(entry.marks.get("shared")))


class PureHost:
    """Environments that only compute, in the caller's thread and without an event loop: a call costs microseconds."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        self._make = spec.load()
        self._open: dict[str, Any] = {}
        self._is_long: dict[type, bool] = {}  # of classes: isinstance of a protocol takes longer than a whole step
        self._results: list[Result] = []

    def start(self, uid: str, prompt: Prompt, seed: int) -> None:
        """As EnvironmentHost.start."""
        try:
            environment: Any = self._make(prompt)
            self._open[uid] = environment
            if type(environment) not in self._is_long:
                self._is_long[type(environment)] = isinstance(environment, Resets)
            is_long = self._is_long[type(environment)]
            self._results.append((uid, read_observation(environment.reset(prompt, seed)) if is_long else GOES_ON))
        except Exception as error:  # the user's code
            self._results.append((uid, Failure("environment", describe(error))))

    def step(self, uid: str, answer: Answer) -> None:
        """As EnvironmentHost.step."""
        environment = self._open[uid]
        try:
            observation = environment.step(answer if self._is_long[type(environment)] else answer.text)
            if inspect.iscoroutine(observation):
                observation.close()
                raise TypeError("its step is async, but it is registered with pure=True; register it without")
            self._results.append((uid, read_observation(observation)))
        except Exception as error:  # the user's code
            self._results.append((uid, Failure("environment", describe(error))))

    def close(self, uid: str) -> None:
        """As EnvironmentHost.close."""
        self._open.pop(uid, None)

    def poll(self, timeout_seconds: float) -> list[Result]:
        """As EnvironmentHost.poll; never waits, because nothing can come."""
        results, self._results = self._results, []
        return results

    def shutdown(self) -> None:
        """As EnvironmentHost.shutdown."""
        self._open.clear()


class InlineHost:
    """Environments in the caller's thread: each result is there when the call returns."""

    def __init__(self, spec: EnvironmentSpec, run: Callable[[Coroutine[Any, Any, Outcome]], Outcome]) -> None:
        self._make, self._run = spec.load(), run
        self._open: dict[str, Running] = {}
        self._results: list[Result] = []

    def start(self, uid: str, prompt: Prompt, seed: int) -> None:
        """As EnvironmentHost.start."""
        self._open[uid] = Running(self._make)
        self._results.append((uid, self._run(self._open[uid].call("reset", prompt, seed))))

    def step(self, uid: str, answer: Answer) -> None:
        """As EnvironmentHost.step."""
        self._results.append((uid, self._run(self._open[uid].call("step", answer))))

    def close(self, uid: str) -> None:
        """As EnvironmentHost.close."""
        if (running := self._open.pop(uid, None)) is not None:
            self._results = [result for result in self._results if result[0] != uid]
            _note_close(uid, self._run(running.call("close")))

    def poll(self, timeout_seconds: float) -> list[Result]:
        """As EnvironmentHost.poll; never waits, because nothing can come."""
        results, self._results = self._results, []
        return results

    def shutdown(self) -> None:
        """As EnvironmentHost.shutdown."""
        for uid in list(self._open):
            self.close(uid)


@dataclass(eq=False)
class _Episode:
    uid: str
    number: int
    prompt: Prompt
    seed: int
    answers: list[Answer] = field(default_factory=list)  # for a replay
    child: Talker | None = None  # None while it waits for a process, and once that is gone
    is_awaited: bool = True  # the result of its last call is
    failure: Failure | None = None  # of its process, or of a replay


@dataclass(frozen=True)
class _Call:
    episode: _Episode
    verb: str
    deadline: float
    is_awaited: bool  # otherwise its result was given before


class ProcessHost:
    """Environments in processes: one each, at most `max_processes` at a time (later episodes wait for a place), or all
    in one. Where a shared process ends, the episode that was at work fails, and the others are replayed.

    One thread owns it. Waits: in `poll` alone."""

    def __init__(self, code: bytes, deadlines: Deadlines, max_processes: int, *, is_shared: bool) -> None:
        self._children = Children("whet.environments.running:prepare", pickle.dumps((code, is_shared)))
        self._end = weakref.finalize(self, self._children.close)  # at the latest when the interpreter ends
        self._deadlines, self._is_shared = deadlines, is_shared
        self._max_processes = 1 if is_shared else max_processes
        self._numbers = count(1)
        self._open: dict[str, _Episode] = {}
        self._queue: deque[_Episode] = deque()
        self._calls: dict[Talker, dict[int, _Call]] = {}  # under way, oldest first
        self._results: list[Result] = []

    def start(self, uid: str, prompt: Prompt, seed: int) -> None:
        """As EnvironmentHost.start."""
        self._open[uid] = _Episode(uid, next(self._numbers), prompt, seed)
        self._queue.append(self._open[uid])
        self._seat()

    def step(self, uid: str, answer: Answer) -> None:
        """As EnvironmentHost.step."""
        episode = self._open[uid]
        episode.is_awaited = True
        if episode.failure is not None:
            self._give(episode, episode.failure)
            return
        if self._is_shared:
            episode.answers.append(answer)
        self._call(episode, "step", answer)

    def close(self, uid: str) -> None:
        """As EnvironmentHost.close."""
        episode = self._open.pop(uid, None)
        if episode is None:
            return
        self._results = [result for result in self._results if result[0] != uid]
        if episode in self._queue:
            self._queue.remove(episode)
        elif episode.child is not None:
            self._call(episode, "close")

    def poll(self, timeout_seconds: float) -> list[Result]:
        """As EnvironmentHost.poll."""
        until = time.monotonic() + timeout_seconds
        while True:
            for event in self._children.poll(0.0 if self._results else max(0.0, until - time.monotonic())):
                self._take(event)
            if self._results or time.monotonic() >= until:
                results, self._results = self._results, []
                return results

    def shutdown(self) -> None:
        """As EnvironmentHost.shutdown."""
        for uid in list(self._open):
            self.close(uid)
        while self._end.alive and any(self._calls.values()):
            self.poll(POLL_SECONDS)
        self._end()

    def _seat(self) -> None:
        """Gives waiting episodes a process, as far as there is room, and the calls that they have had."""
        while self._queue and (self._is_shared or len(self._calls) < self._max_processes):
            episode = self._queue.popleft()
            episode.child = next(iter(self._calls), None) if self._is_shared else None
            if episode.child is None:
                episode.child = self._children.start()
                self._calls[episode.child] = {}
            steps = [("step", answer) for answer in episode.answers]
            *before, last = [("reset", episode.prompt, episode.seed), *steps]
            for call in before:
                self._call(episode, *call, is_awaited=False)
            self._call(episode, *last, is_awaited=episode.is_awaited)

    def _call(self, episode: _Episode, verb: str, *arguments: Any, is_awaited: bool = True) -> None:
        assert episode.child is not None
        try:
            content = pickle.dumps((verb, episode.number, arguments))
        except Exception as error:  # whatever an object of the user's raises when it is pickled
            what = f"the prompt cannot be sent to the environment's process: {describe(error)}"
            self._give(episode, Failure("environment", what))
            return
        number, deadline = next(self._numbers), time.monotonic() + self._deadlines.of(verb)
        self._calls[episode.child][number] = _Call(episode, verb, deadline, is_awaited)
        self._children.send(episode.child, number, content)
        self._set_deadline(episode.child)

    def _give(self, episode: _Episode, outcome: Outcome) -> None:
        """Adds a result, unless the episode was closed meanwhile."""
        episode.is_awaited = False
        if self._open.get(episode.uid) is episode:
            self._results.append((episode.uid, outcome))

    def _set_deadline(self, child: Talker) -> None:
        child.deadline = min((call.deadline for call in self._calls[child].values()), default=math.inf)

    def _take(self, event: Event) -> None:
        if event.child not in self._calls:  # it was ended after it said this
            return
        if not isinstance(event, Said):
            self._lose(event.child, event.why, is_late=event.is_late)
            return
        try:
            outcome: Outcome | None = pickle.loads(event.content)
        except Exception:  # the user's code may write anything
            outcome = None
        call = self._calls[event.child].pop(event.number, None)
        if call is None or outcome is None:
            self._children.kill(event.child)
            self._lose(event.child, BROKEN)
            return
        self._set_deadline(event.child)
        if call.verb == "close":
            _note_close(call.episode.uid, outcome)
            if not self._is_shared:
                self._children.kill(event.child)
                del self._calls[event.child]
                self._seat()
        elif call.is_awaited:
            self._give(call.episode, call.episode.failure or outcome)
        elif isinstance(outcome, Failure):
            call.episode.failure = outcome

    def _lose(self, child: Talker, why: str, *, is_late: bool = False) -> None:
        """Fails the episode that was at work in a process that is gone, and has the others begin again in another."""
        calls = list(self._calls.pop(child).values())
        here = [episode for episode in self._open.values() if episode.child is child]
        now = time.monotonic()
        at_work = next((call for call in calls if not is_late or call.deadline <= now), None)
        what = f"the environment's process {why}"
        if at_work is not None and is_late:
            what = f"{at_work.verb} took longer than {self._deadlines.of(at_work.verb):g} s; its process was killed"
        failure = Failure("environment", what, timed_out=is_late)
        if at_work is not None and at_work.verb == "close":
            _note_close(at_work.episode.uid, failure)
        for episode in here:
            episode.child = None
            if self._is_shared and (at_work is None or episode is not at_work.episode):
                self._queue.append(episode)
                continue
            episode.failure = failure
            if episode.is_awaited:
                self._give(episode, failure)
        if self._queue and self._is_shared:
            log.warning("%s; %d other episodes begin again, with their seeds and responses", what, len(self._queue))
        self._seat()


def _note_close(uid: str, outcome: Outcome) -> None:
    if isinstance(outcome, Failure):
        log.warning("the environment of %s was not closed in order: %s", uid, outcome.message)
