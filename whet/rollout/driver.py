# SPDX-License-Identifier: Apache-2.0
"""A driver runs many episodes concurrently, in turns (`Driver.turn`): while a caller waits, or in a thread, so that
sampling continues while models train."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from whet.environments.host import EnvironmentHost
from whet.errors import WorkerError
from whet.phases import counted
from whet.processes.background import Mailbox
from whet.rollout.episode import Command, Delegate, End, Episode, Reset, Sample, Step
from whet.rollout.protocol import POLL_SECONDS, Event, Finished, Partial, Request, RolloutEngine, drop, late
from whet.types import Failure, Outcome, Outcomes, Trajectory

log = logging.getLogger(__name__)
TURN_SECONDS = 0.05  # longest wait of the thread, after which it sees new calls
SWITCH_SECONDS = 1e-4  # Python's thread switch interval: its default, 5e-3, delays short calls of loop and thread
CLOSE_SECONDS = 10.0
SHORT_SECONDS = 0.005  # longest wait for results of one environment if there are several
LOOKED_AT = 256  # submissions to scorers that a turn checks, the longest waiting first
T = TypeVar("T")
OnScored = Callable[[list[list[Outcome]]], None]


@dataclass
class _Open:
    episode: Episode
    on_done: Callable[[Trajectory], None]
    late_at: float = math.inf
    children: list[str] = field(default_factory=list)  # ids of the episodes of its sub-agents


class Driver(Mailbox):
    """Carries out the commands of episodes. A turn sends requests and collects results. Episodes may be added at any
    time. A caller that waits makes the turns. With `in_thread` a thread makes them, from the first call on; its errors
    are raised in waiting callers."""

    def __init__(
        self,
        engine: RolloutEngine,
        environments: Mapping[str, EnvironmentHost],
        deadline_seconds: float = 3600.0,
        *,
        in_thread: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`environments` are keyed by the name of the sub-agent; `deadline_seconds` limits each wait of a caller."""
        super().__init__()
        self.engine, self.environments = engine, environments
        self.deadline_seconds, self._in_thread, self._clock = deadline_seconds, in_thread, clock
        self._open: dict[str, _Open] = {}  # by id of the episode
        self._first_late_at = math.inf  # no episode is late before
        self._unsent = deque[tuple[Episode, Request]]()
        self._sampling: dict[str, Episode] = {}  # by the uid of their request
        self._stepping: dict[str, str] = {}  # sub-agent by id of the episode, while its environment resets or steps
        self._to_score = list[tuple[Callable[[], Sequence[Outcomes]], OnScored]]()
        self._scoring = list[tuple[Sequence[Outcomes], OnScored]]()
        self._num_tokens = 0  # of all completions so far
        self.does, self._num_waiting = "", 0  # phase of the loop; number of callers that wait
        self.limit_seconds = defaultdict[str | None, float](float)  # by bottleneck (`_limit`)
        self.idle_seconds = 0.0  # in which the engine had nothing to sample
        self._thread: threading.Thread | None = None
        self._is_closing, self._switch_seconds = False, sys.getswitchinterval()

    @property
    def is_idle(self) -> bool:
        """Tells whether no episode runs."""
        return not self._open

    @property
    def episodes(self) -> Iterator[Episode]:
        """Episodes that have not ended."""
        return (each.episode for each in self._open.values())

    # ---- for its callers

    def promise(self) -> Future[Any]:
        """Returns a future whose result is set between two turns. It fails if the thread fails."""
        return super().promise() if self._in_thread else Future()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Calls a function between two turns.  Returns a future of its result."""
        if self._in_thread:
            return self._submit(call)
        future = Future[T]()
        try:
            future.set_result(call())
        except Exception as error:  # errors belong to the caller
            future.set_exception(error)
        return future

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        future = super().submit(call)
        if self._thread is None and not future.done():
            sys.setswitchinterval(SWITCH_SECONDS)
            self._thread = threading.Thread(target=self._go, name="rollouts", daemon=True)
            self._thread.start()
        return future

    def finish(self, function: Callable[[], T]) -> T:
        """Calls a function between two turns, waits for its result and returns it."""
        return self.wait(self.submit(function), lambda: (0, 1))

    def wait(
        self, future: Future[T], progress: Callable[[], tuple[int, int]], between: Callable[[], None] | None = None
    ) -> T:
        """Waits for the result of a future, at most `deadline_seconds`; returns it. `progress` returns the numbers of
        finished items and of all items. `between` is called between turns and may raise.

        Raises: DeadlineError; errors of a turn."""
        began, before, self._num_waiting = self._clock(), self._num_tokens, self._num_waiting + 1
        try:
            while not future.done():
                if self._in_thread:
                    wait([future], TURN_SECONDS)
                else:
                    self._take_turn(POLL_SECONDS)
                if between is not None:
                    between()
                (done, total), tokens, seconds = progress(), self._num_tokens - before, self._clock() - began
                counted(done, total, f"{tokens / seconds:,.0f} tokens/s" if tokens and seconds > 0 else "")
                if seconds > self.deadline_seconds and not future.done():
                    raise late(self.engine, self.deadline_seconds, total - done, total)
            return future.result()
        except BaseException:
            if not self._in_thread:
                self._abandon_all()
            raise
        finally:
            self._num_waiting, self.does = self._num_waiting - 1, self.does or "training"

    def _abandon_all(self) -> None:
        """Ends all episodes without results, after an error of a caller."""
        drop(self.engine, list(self._sampling))
        self._sampling, self._to_score, self._scoring = {}, [], []
        self._abandon(list(self._open))

    def close(self) -> None:
        """Ends the thread and the processes of environments."""
        self._is_closing = True
        if self._thread is not None:
            sys.setswitchinterval(self._switch_seconds)
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                log.warning("the thread of the rollouts did not end within %g s", CLOSE_SECONDS)
        self.fail(WorkerError("rollouts", "they are closed", change="build the run again"))
        for host in self.environments.values():
            host.shutdown()

    def _go(self) -> None:
        """Main function of the thread: runs calls and turns until the driver is closed."""
        try:
            while not self._is_closing:
                self._take_turn(TURN_SECONDS)
        except BaseException as error:
            self.fail(error)

    # ---- between two turns

    def add(self, episodes: Sequence[Episode], on_done: Callable[[Trajectory], None]) -> None:
        """Starts episodes. `on_done` is called with the trajectory of each."""
        for episode in episodes:
            self._open[episode.id] = opened = _Open(episode, on_done)
            if episode.stage.is_silent:
                self._set_deadline(opened)
            self._carry_out(episode, episode.start())

    def abandon_prompts(self, uids: Sequence[str]) -> None:
        """Ends the training episodes of these prompts, without results."""
        gone = {*uids}
        found = [each.id for each in self.episodes if each.prompt.uid in gone and each.rules.purpose == "rollout"]
        self._abandon(found)

    def score(self, submit: Callable[[], Sequence[Outcomes]], on_scored: OnScored) -> None:
        """Calls `submit`, which starts scoring, in the next turn. Later calls `on_scored` with all outcomes."""
        self._to_score.append((submit, on_scored))

    def note_partials(self) -> None:
        """Makes each episode record the tokens that its running request has sampled so far, for a checkpoint."""
        self.engine.pause()
        events = self.engine.poll(0.0)
        self.engine.resume()
        self._handle(events)

    # ---- a turn

    def _take_turn(self, timeout_seconds: float) -> None:
        """Makes a turn; in a thread also calls. Adds its duration to the seconds of the bottleneck (`_limit`)."""
        began = time.monotonic()
        if self._in_thread:
            self.serve(TURN_SECONDS if self.is_idle else 0.0)
        was_sampling, limit = bool(self._sampling), self._limit()
        self.turn(timeout_seconds)
        seconds = time.monotonic() - began
        self.idle_seconds += 0.0 if was_sampling else seconds
        self.limit_seconds[limit] += seconds

    def turn(self, timeout_seconds: float) -> None:
        """Submits requests, waits up to `timeout_seconds` for observations and completions, and collects scores.

        Raises: errors of the engine and of scoring functions."""
        waits = not self._in_thread and self.is_idle  # for scores, if there is nothing else to do
        self._send()
        if self._stepping:
            self._take_observations(0.0 if self._sampling else timeout_seconds)
        if self._sampling:
            self._handle(self.engine.poll(0.0 if self._stepping or self._unsent else timeout_seconds))
        self._fail_late_episodes()
        self._take_scores(waits)

    def _limit(self) -> str | None:
        """The bottleneck: the part of the run that callers wait for. Without callers: None in sampling, else `does`."""
        if not self._num_waiting:
            return None if self._sampling else self.does or None
        if self._sampling:
            return "sampling"
        return "rewards" if self.is_idle else "environments"

    def _carry_out(self, episode: Episode, commands: Sequence[Command]) -> None:
        for command in commands:
            opened = self._open[episode.id]
            match command:
                case Sample():
                    self._unsent.append((episode, command.request))
                case End():
                    if opened.children:
                        self._abandon([child for child in opened.children if child in self._open])
                    self._let_go(episode)
                    del self._open[episode.id]
                    opened.on_done(command.trajectory)
                case Delegate():
                    opened.children.append(command.child.id)
                    self.add([command.child], partial(self._on_delegated, episode))
                case Step():
                    self._stepping[episode.id] = episode.agent
                    self.environments[episode.agent].step(episode.id, command.answer)
                case Reset():
                    self._stepping[episode.id] = episode.agent
                    self.environments[episode.agent].start(episode.id, episode.prompt, episode.seed)

    def _let_go(self, episode: Episode) -> None:
        """Closes the environment of an episode."""
        if not episode.stage.is_silent:
            self.environments[episode.agent].close(episode.id)

    def _on_delegated(self, parent: Episode, trajectory: Trajectory) -> None:
        self._carry_out(parent, parent.on_delegated(trajectory))

    def _abandon(self, ids: Sequence[str]) -> None:
        """Ends episodes, with the episodes of their sub-agents, without results."""
        self._stop_calls(ids)
        for uid in ids:
            if (opened := self._open.pop(uid, None)) is not None:
                self._abandon(opened.children)
                self._let_go(opened.episode)

    def _send(self) -> None:
        """Submits requests until the engine is full."""
        while self._unsent and self.engine.submit(self._unsent[0][1]):
            episode, request = self._unsent.popleft()
            self._sampling[request.uid] = episode

    def _take_observations(self, timeout_seconds: float) -> None:
        agents = set(self._stepping.values())
        wait = timeout_seconds if len(agents) == 1 else min(timeout_seconds, SHORT_SECONDS)
        for uid, result in chain.from_iterable(self.environments[agent].poll(wait) for agent in sorted(agents)):
            if uid not in self._stepping:
                continue
            del self._stepping[uid]
            episode = self._open[uid].episode
            self._carry_out(episode, episode.on_result(result))

    def _handle(self, events: Sequence[Event]) -> None:
        for event in events:
            if (episode := self._sampling.get(event.uid)) is None:
                continue
            match event:
                case Partial():
                    episode.on_partial(event)
                    continue
                case Finished():
                    self._num_tokens += len(event.completion.token_ids)
                    commands = episode.on_completion(event.completion)
                case _:
                    commands = episode.on_failure(event.failure)
            del self._sampling[event.uid]
            self._carry_out(episode, commands)

    def _take_scores(self, waits: bool) -> None:
        """Submits trajectories for scoring, and passes on outcomes. With `waits`, waits for the oldest submission."""
        self._scoring += [(submit(), on_scored) for submit, on_scored in self._to_score]
        self._to_score.clear()
        looked_at = self._scoring[:LOOKED_AT]
        ready = [each for each in looked_at if all(of.done() for of in each[0])] or looked_at[: int(waits)]
        if taken := set(map(id, ready)):
            self._scoring = [each for each in self._scoring if id(each) not in taken]
        for outcomes, on_scored in ready:
            on_scored([each.result() for each in outcomes])

    def _set_deadline(self, opened: _Open) -> None:
        opened.late_at = min(opened.late_at, self._clock() + opened.episode.stage.limits.seconds)
        self._first_late_at = min(self._first_late_at, opened.late_at)

    def _fail_late_episodes(self) -> None:
        """Fails episodes over their time limit. It counts from the reset, not while they wait for an environment."""
        for uid in chain.from_iterable(host.begun() for host in self.environments.values()):
            if uid in self._open:
                self._set_deadline(self._open[uid])
        if (now := self._clock()) > self._first_late_at:
            self._fail([uid for uid, each in self._open.items() if now > each.late_at])
            self._first_late_at = min((each.late_at for each in self._open.values()), default=math.inf)

    def _fail(self, late: Sequence[str]) -> None:
        self._stop_calls(late)
        for uid in late:
            if uid in self._open:  # else it was a task of another late episode
                self._stepping.pop(uid, None)  # the end of a late task may just have started a step
                episode = self._open[uid].episode
                why = f"the episode took longer than {episode.stage.limits.seconds:g} s"
                self._carry_out(episode, episode.on_failure(Failure("environment", why, timed_out=True)))

    def _stop_calls(self, ids: Sequence[str]) -> None:
        """Aborts the requests of episodes. Later results of their environments are ignored."""
        gone = {*ids}
        requests = [uid for uid, episode in self._sampling.items() if episode.id in gone]
        if requests:
            self.engine.abort(requests)  # their events are ignored from now on
        for uid in requests:
            del self._sampling[uid]
        self._unsent = deque(each for each in self._unsent if each[0].id not in gone)
        self._stepping = {uid: agent for uid, agent in self._stepping.items() if uid not in gone}
