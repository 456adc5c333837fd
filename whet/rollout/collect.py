# SPDX-License-Identifier: Apache-2.0
"""The driver of episodes: runs them side by side, none waiting for another."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, takewhile
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from whet.data.media import MediaReader
from whet.environments.host import Deadlines, EnvironmentHost, open_host
from whet.environments.protocol import Observation
from whet.environments.tools.toolbox import Toolbox
from whet.errors import DataError
from whet.keyed import key
from whet.phases import counted
from whet.registry import ENVIRONMENTS
from whet.rollout.codec import TemplateCodec
from whet.rollout.episode import MAIN, Close, Command, Delegate, Episode, Limits, Reset, Rules, Sample, Score, Step
from whet.rollout.protocol import POLL_SECONDS, Event, Finished, Partial, RolloutEngine, SamplingParams, drop, late
from whet.types import Failure, Prompt, Trajectory

SHORT_SECONDS = 0.005  # for the results of one of several environments
T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """An environment and the limits of its episodes."""

    environment: str = "single_turn"
    options: Mapping[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    seconds: Deadlines = field(default_factory=Deadlines)  # of its calls
    episode_seconds: float = 3600.0
    max_episodes: int | None = None
    tools: Toolbox | None = None  # with their parser
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # with the tools (`with_tools`)

    @property
    def is_silent(self) -> bool:
        """Tells whether the environment ends each episode after its first turn, and says nothing: no host runs it."""
        is_plain = self.tools is None and self.max_episodes is None
        return is_plain and bool(ENVIRONMENTS[self.environment].marks.get("silent"))

    def open(self) -> EnvironmentHost:
        """Opens the host of the environment.  Raises: as `open_host`."""
        return open_host(
            self.environment, self.options, tools=self.tools, deadlines=self.seconds, max_episodes=self.max_episodes
        )


class Collector:
    """Runs episodes of one environment on one engine. A failure of an environment or a request ends its own episode."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stage: Stage | None = None,
        agents: Mapping[str, Stage] | None = None,
        apply_chat_template: bool = True,
        seed: int = 0,
        deadline_seconds: float = 3600.0,
        hosts: Mapping[str, EnvironmentHost] | None = None,
        reader: MediaReader | None = None,
        turns: Callable[[Driver, float], Turns] | None = None,
    ) -> None:
        """`agents` are the stages of sub-agents; `hosts`, by agent, take the place of those of this process; `reader`
        reads images and videos of observations; `turns` makes the turns of the driver, by default `Turns`."""
        self.seed, self.stage, self.agents = seed, stage or Stage(), dict(agents or {})
        self.reader, stages = reader, {MAIN: self.stage, **self.agents}
        self.silent = {name for name, each in stages.items() if each.is_silent}
        if hosts is None:
            hosts = {name: each.open() for name, each in stages.items() if name not in self.silent}
        self.environments = dict(hosts)
        self.codecs = {
            name: TemplateCodec(
                tokenizer,
                apply_chat_template=apply_chat_template,
                chat_template_kwargs=each.chat_template_kwargs,
                tools=each.tools,
                reader=reader,
            )
            for name, each in stages.items()
        }
        seconds = {name: each.episode_seconds for name, each in stages.items()}
        self.driver = Driver(engine, self.environments, seconds)
        self.turns = (turns or Turns)(self.driver, deadline_seconds)

    @property
    def engine(self) -> RolloutEngine:
        """The engine that its episodes are sampled by."""
        return self.driver.engine

    def episodes(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, *, step: int, purpose: str = "rollout"
    ) -> list[Episode]:
        """n episodes of each prompt, in order; `step` and `purpose` name their random draws."""
        rules = Rules(self.codecs[MAIN], params, self.seed, step, purpose, self.stage.limits, MAIN in self.silent)
        agents = {
            name: replace(rules, codec=self.codecs[name], limits=each.limits, is_silent=name in self.silent)
            for name, each in self.agents.items()
        }
        rules = replace(rules, agents=agents)
        seeds = [key(self.seed, "environment", purpose, step, prompt.uid) for prompt in prompts]
        return [
            Episode(prompt, sample, rules, seed)
            for prompt, seed in zip(prompts, seeds, strict=True)
            for sample in range(n)
        ]

    def collect(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, *, step: int, purpose: str = "rollout"
    ) -> list[list[Trajectory]]:
        """n trajectories of each prompt in order, not scored.  Raises: DeadlineError; what the engine raises."""
        episodes, done = self.episodes(prompts, n, params, step=step, purpose=purpose), dict[str, Trajectory]()
        whole, total = self.turns.promise(), len(episodes)

        def note(trajectory: Trajectory) -> None:
            done[trajectory.uid] = trajectory
            if len(done) == total:
                whole.set_result(None)

        if episodes:
            self.turns.call(lambda: self.driver.add(episodes, note))
            self.turns.wait(whole, lambda: (len(done), total))
        found = [done[episode.uid] for episode in episodes]
        return [found[start : start + n] for start in range(0, len(found), n)]

    def close(self) -> None:
        """Ends the turns, and the environments' processes."""
        self.turns.close()
        for host in self.environments.values():
            host.shutdown()


class Turns:
    """Makes the turns of a driver while somebody waits."""

    blocks = True  # who waits makes the turns, and has nothing else to do
    turn_seconds = POLL_SECONDS

    def __init__(self, driver: Driver, deadline_seconds: float) -> None:
        self.driver, self.deadline_seconds = driver, deadline_seconds
        # Called behind a turn; True: it may wait, nothing else is to be done.
        self.after: Callable[[bool], None] = lambda waits: None
        self.limit: Callable[[], str | None] = lambda: None  # part of the run that the others wait for now
        self.limit_seconds = defaultdict[str | None, float](float)  # by that part
        self.idle_seconds = 0.0  # in which the engine had nothing to sample

    def promise(self) -> Future[Any]:
        """A future that is fulfilled by a later turn."""
        return Future()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function between two turns.  Returns the future of its result."""
        future = self.promise()
        try:
            future.set_result(function())
        except Exception as error:  # it belongs to the caller
            future.set_exception(error)
        return future

    def finish(self, function: Callable[[], T]) -> T:
        """Calls a function between two turns, and waits for its result."""
        return self.wait(self.call(function), lambda: (0, 1))

    def wait(
        self, future: Future[T], progress: Callable[[], tuple[int, int]], between: Callable[[], None] | None = None
    ) -> T:
        """The result of a future, at most `deadline_seconds` from now; `progress` gives what is there and all that is
        waited for, `between` is called now and then and may raise.

        Raises: DeadlineError; what a turn raises."""
        until, speed = time.monotonic() + self.deadline_seconds, self.driver.speed()
        try:
            while not future.done():
                self.pass_time(future)
                if between is not None:
                    between()
                done, total = progress()
                counted(done, total, speed())
                if time.monotonic() > until and not future.done():
                    raise late(self.driver.engine, self.deadline_seconds, total - done, total)
            return future.result()
        except BaseException:
            self.leave()
            raise

    def pass_time(self, future: Future[Any], began: float | None = None) -> None:
        """Makes a turn, and counts the seconds since it `began` (None: now) for the part that limits the run."""
        began, was_sampling, limit = began or time.monotonic(), self.driver.is_sampling, self.limit()
        waits = self.blocks and self.driver.is_idle
        self.driver.turn(self.turn_seconds)
        self.after(waits)
        seconds = time.monotonic() - began
        self.idle_seconds += 0.0 if was_sampling else seconds
        self.limit_seconds[limit] += seconds

    def leave(self) -> None:
        """Ends all episodes, after an error."""
        self.driver.drop()

    def close(self) -> None:
        """Makes no more turns."""


@dataclass(frozen=True)
class _Open:
    episode: Episode
    on_done: Callable[[Trajectory], None]
    children: list[str] = field(default_factory=list)  # ids of the episodes of its sub-agents


class Driver:
    """Carries out the commands of episodes, which may be added at any time. One thread owns it."""

    def __init__(
        self,
        engine: RolloutEngine,
        environments: Mapping[str, EnvironmentHost],
        episode_seconds: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`environments` and `episode_seconds` are keyed by the name of the sub-agent."""
        self.engine, self.environments, self.episode_seconds = engine, environments, episode_seconds
        self._clock = clock
        self._open: dict[str, _Open] = {}  # by id of the episode
        self._late_at = {agent: dict[str, float]() for agent in episode_seconds}  # by sub-agent and id
        self._unsent = deque[Sample]()
        self._num_tokens = 0  # of all completions so far
        self._sampling: dict[str, Episode] = {}  # by the uid of their request
        self._stepping: dict[str, str] = {}  # sub-agent by id of the episodes whose environment has the turn

    @property
    def is_idle(self) -> bool:
        """Tells whether there is nothing to wait for."""
        return not self._open

    @property
    def episodes(self) -> Iterator[Episode]:
        """Episodes that are not over."""
        return (each.episode for each in self._open.values())

    @property
    def is_sampling(self) -> bool:
        """Tells whether the engine has something to do."""
        return bool(self._sampling)

    def speed(self) -> Callable[[], str]:
        """Returns a function that tells the tokens per second of the completions since now, "" before the first."""
        started, before = self._clock(), self._num_tokens

        def shown() -> str:
            tokens, seconds = self._num_tokens - before, self._clock() - started
            return f"{tokens / seconds:,.0f} tokens/s" if tokens and seconds > 0 else ""

        return shown

    def add(self, episodes: Sequence[Episode], on_done: Callable[[Trajectory], None]) -> None:
        """Begins episodes; `on_done` gets the trajectory of each."""
        for episode in episodes:
            self._begin(episode, on_done)

    def turn(self, timeout_seconds: float) -> None:
        """Sends requests, and waits for observations and completions up to `timeout_seconds`.

        Raises: what the engine raises."""
        self._send()
        if self._stepping:
            self._take_observations(0.0 if self._sampling else timeout_seconds)
        if self._sampling:
            self._handle(self.engine.poll(0.0 if self._stepping or self._unsent else timeout_seconds))
        self._fail_late_episodes()

    def drop(self) -> None:
        """Ends all episodes without a word, after an error."""
        drop(self.engine, list(self._sampling))
        for each in self._open.values():
            self._let_go(each.episode)
        self._open, self._sampling, self._stepping = {}, {}, {}
        self._unsent.clear()

    def note_partials(self) -> None:
        """Lets every episode note the tokens that its running request has so far, for a checkpoint."""
        self.engine.pause()
        events = self.engine.poll(0.0)
        self.engine.resume()
        self._handle(events)

    def _begin(self, episode: Episode, on_done: Callable[[Trajectory], None]) -> None:
        self._open[episode.id] = _Open(episode, on_done)
        if episode.rules.is_silent:
            self._late_at[episode.agent][episode.id] = self._clock() + self.episode_seconds[episode.agent]
        self._carry_out(episode.start())

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            opened = self._open[uid := command.episode]
            agent = opened.episode.agent
            match command:
                case Sample():
                    self._unsent.append(command)
                case Score():
                    del self._open[uid]
                    opened.on_done(command.trajectory)
                case Close():
                    if opened.children:
                        self._abandon([child for child in opened.children if child in self._open])
                    self._let_go(opened.episode)
                case Delegate():
                    opened.children.append(command.child.id)
                    self._begin(command.child, partial(self._on_delegated, opened.episode))
                case Step():
                    self._stepping[uid] = agent
                    self.environments[agent].step(uid, command.answer)
                case Reset():
                    self._stepping[uid] = agent
                    self.environments[agent].start(uid, command.prompt, command.seed)

    def _let_go(self, episode: Episode) -> None:
        """Ends the environment of an episode, and its deadline."""
        if not episode.rules.is_silent:
            self.environments[episode.agent].close(episode.id)
        self._late_at[episode.agent].pop(episode.id, None)

    def _on_delegated(self, parent: Episode, trajectory: Trajectory) -> None:
        self._carry_out(parent.on_delegated(trajectory))

    def _abandon(self, ids: Sequence[str]) -> None:
        """Ends episodes without a word."""
        self._stop_calls(ids)
        for uid in ids:
            opened = self._open.pop(uid, None)
            if opened is not None:
                self._abandon(opened.children)
                self._let_go(opened.episode)

    def _send(self) -> None:
        """Submits requests until the engine is full."""
        while self._unsent and self.engine.submit(self._unsent[0].request):
            sample = self._unsent.popleft()
            self._sampling[sample.request.uid] = self._open[sample.episode].episode

    def _take_observations(self, timeout_seconds: float) -> None:
        agents = set(self._stepping.values())
        wait = timeout_seconds if len(agents) == 1 else min(timeout_seconds, SHORT_SECONDS)
        for uid, result in chain.from_iterable(self.environments[agent].poll(wait) for agent in sorted(agents)):
            if uid not in self._stepping:
                continue
            del self._stepping[uid]
            episode = self._open[uid].episode
            match _read(episode, result):
                case Failure() as failure:
                    self._carry_out(episode.on_failure(failure))
                case observation:
                    self._carry_out(episode.on_observation(observation))

    def _handle(self, events: Sequence[Event]) -> None:
        for event in events:
            episode = self._sampling.get(event.uid)
            if episode is None:
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
            self._carry_out(commands)

    def _fail_late_episodes(self) -> None:
        """Fails the episodes whose time is over, which counts from the reset: before that they wait for a place."""
        now, late = self._clock(), list[str]()
        for agent, host in self.environments.items():
            for uid in host.begun():
                if uid in self._open:
                    self._late_at[agent].setdefault(uid, now + self.episode_seconds[agent])
        for deadlines in self._late_at.values():
            late += [uid for uid, _ in takewhile(lambda each: now > each[1], deadlines.items())]
        if late:
            self._fail(late)

    def _fail(self, late: Sequence[str]) -> None:
        self._stop_calls(late)
        for uid in late:
            if uid in self._open:  # else it was a task of another late one
                self._stepping.pop(uid, None)  # a late task may just have given it a turn
                episode = self._open[uid].episode
                why = f"the episode took longer than {self.episode_seconds[episode.agent]:g} s"
                self._carry_out(episode.on_failure(Failure("environment", why, timed_out=True)))

    def _stop_calls(self, ids: Sequence[str]) -> None:
        """Aborts the requests of episodes, and listens to no more results of their environments."""
        if not ids:
            return
        gone = {*ids}
        requests = [uid for uid, episode in self._sampling.items() if episode.id in gone]
        self.engine.abort(requests)  # others go on: what comes of these is not listened to
        for uid in requests:
            del self._sampling[uid]
        self._unsent = deque(sample for sample in self._unsent if sample.episode not in gone)
        self._stepping = {uid: agent for uid, agent in self._stepping.items() if uid not in gone}


def _read(episode: Episode, result: Observation | Failure) -> Observation | Failure:
    """The observation as the model of an episode reads it; a failure where it cannot."""
    if isinstance(result, Failure) or not (result.messages or result.media or result.tasks):
        return result
    try:
        return episode.rules.codec.read(result)
    except DataError as error:
        return Failure("environment", str(error))
