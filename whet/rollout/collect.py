# SPDX-License-Identifier: Apache-2.0
"""The driver of episodes: runs them side by side, none waiting for another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, takewhile
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from whet.data.chat import as_text, encode_continuation, encode_rendered, encode_texts, plain_text, render_chat
from whet.data.media import Kind, MediaReader
from whet.data.placeholders import expanded, has_parts, has_tag, place
from whet.data.written import warn_once
from whet.environments.host import Deadlines, EnvironmentHost, open_host
from whet.environments.protocol import Observation
from whet.environments.tools.toolbox import Toolbox
from whet.errors import DataError
from whet.keyed import key
from whet.phases import counted
from whet.rollout.episode import MAIN, Close, Command, Delegate, Episode, Limits, Rules, Sample, Score, Step
from whet.rollout.protocol import POLL_SECONDS, Event, Finished, Partial, RolloutEngine, SamplingParams, drop, late
from whet.types import Failure, Media, Message, Prompt, Trajectory, Turn

BARE_TAG = (
    "an observation of the environment has <image> or <video> in its text and no media: the model reads the tag as "
    "text (said once); return Observation(..., media=(whet.data.media.image(...),)), or leave the tag out"
)


class TemplateCodec:
    """The tokenizer and its chat template; without the template, text follows text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        apply_chat_template: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Toolbox | None = None,
        reader: MediaReader | None = None,
    ) -> None:
        """`tools` have their parser; `chat_template_kwargs` tell them to the model. `reader` is that of images and
        videos, None for a model of text."""
        self.tools, self.reader = tools, reader
        self.tokenizer, self.apply_chat_template = tokenizer, apply_chat_template
        self.chat_template_kwargs = chat_template_kwargs or {}

    def decode(self, token_ids: Sequence[int]) -> str:
        return cast(str, self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def calls(self, token_ids: Sequence[int], turn: int) -> tuple[Mapping[str, Any], ...]:
        return () if self.tools is None else self.tools.calls(self.tokenizer, token_ids, turn)

    def read(self, observation: Observation) -> Observation:
        """The observation with its images and videos measured, and a content part for each.  Raises: DataError."""
        if any(has_parts(task.messages) for task in observation.tasks):
            raise DataError("a task for a sub-agent has images or videos; expected text: describe them")
        if observation.media or has_parts(observation.messages):
            return self._with_media(observation)
        if self.reader is not None and has_tag(observation.messages):  # perhaps text of somebody else
            warn_once(BARE_TAG)
        return observation

    def _with_media(self, observation: Observation) -> Observation:
        if self.reader is None and all("tool_call_id" in message.fields for message in observation.messages):
            warn_once("a tool gave an image, but the model reads only text: it reads [image] in its place (said once)")
            return replace(observation, messages=tuple(map(_as_text, observation.messages)), media=())
        if self.reader is None:
            raise DataError("the observation has images or videos, but the model reads only text; leave them out")
        given = [(cast(Kind, each.kind), each) for each in observation.media]
        placed, values = place(observation.messages, given, owner="observation that the environment returned")
        media = tuple(self.reader.read(*value) for value in values)
        return replace(observation, messages=placed, media=media)

    def opening(self, messages: Sequence[Message], media: Sequence[Media] = ()) -> list[int]:
        if self.apply_chat_template:
            options = self.chat_template_kwargs
            text = render_chat(self.tokenizer, messages, add_generation_prompt=True, chat_template_kwargs=options)
            return encode_rendered(self.tokenizer, [expanded(text, media)])[0]
        text = plain_text(self.tokenizer, messages, media)
        return encode_texts(self.tokenizer, [text], add_special_tokens=True)[0]

    def continuation(
        self, before: Sequence[Message], new: Sequence[Message], turn: Turn, media: Sequence[Media] = ()
    ) -> list[int]:
        if self.apply_chat_template:
            options = self.chat_template_kwargs
            return encode_continuation(
                self.tokenizer, before, new, turn=turn, chat_template_kwargs=options, media=media
            )
        text = plain_text(
            self.tokenizer, new, media, lambda own: as_text(self.tokenizer, own, self.chat_template_kwargs)
        )
        return encode_rendered(self.tokenizer, [text])[0]


def _as_text(message: Message) -> Message:
    """The message with `[image]` in the place of an image, for a model of text, whose tools may be other people's."""
    parts = [message.content] if isinstance(message.content, str) else message.content
    told = [part if isinstance(part, str) else str(part.get("text", f"[{part['type']}]")) for part in parts]
    return replace(message, content="".join(told))


SHORT_SECONDS = 0.005  # for the results of one of several environments


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
    ) -> None:
        """`agents` are the stages of sub-agents; `hosts`, by agent, take the place of those of this process; `reader`
        reads images and videos of observations."""
        self.seed, self.stage, self.agents = seed, stage or Stage(), dict(agents or {})
        stages = {MAIN: self.stage, **self.agents}
        self.environments = dict(hosts or {name: each.open() for name, each in stages.items()})
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
        self.deadline_seconds = deadline_seconds
        seconds = {name: each.episode_seconds for name, each in stages.items()}
        self.driver = Driver(engine, self.environments, seconds)

    @property
    def engine(self) -> RolloutEngine:
        """The engine that its episodes are sampled by."""
        return self.driver.engine

    def episodes(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, *, step: int, purpose: str = "rollout"
    ) -> list[Episode]:
        """n episodes of each prompt, in order; `step` and `purpose` name their random draws."""
        rules = Rules(self.codecs[MAIN], params, self.seed, step, purpose, self.stage.limits)
        agents = {
            name: replace(rules, codec=self.codecs[name], limits=each.limits) for name, each in self.agents.items()
        }
        rules = replace(rules, agents=agents)
        seeds = [key(self.seed, "environment", purpose, step, prompt.uid) for prompt in prompts]
        return [
            Episode(prompt, sample, rules, seed)
            for prompt, seed in zip(prompts, seeds, strict=True)
            for sample in range(n)
        ]

    def collect(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        *,
        step: int,
        purpose: str = "rollout",
        on_done: Callable[[Trajectory], None] = lambda _: None,
    ) -> list[list[Trajectory]]:
        """n trajectories of each prompt in order, not scored yet; `on_done` gets each as soon as it is finished.
        Raises: DeadlineError; what the engine raises."""
        episodes, done = self.episodes(prompts, n, params, step=step, purpose=purpose), dict[str, Trajectory]()

        def note(trajectory: Trajectory) -> None:
            done[trajectory.uid] = trajectory
            on_done(trajectory)

        self._run(episodes, note, done)
        found = [done[episode.uid] for episode in episodes]
        return [found[start : start + n] for start in range(0, len(found), n)]

    def _run(self, episodes: Sequence[Episode], note: Callable[[Trajectory], None], done: Sized) -> None:
        """Runs episodes until all are `done`, within the deadline."""
        total, until, speed = len(episodes), time.monotonic() + self.deadline_seconds, self.driver.speed()
        try:
            self.driver.add(episodes, note)
            while len(done) < total:
                self.driver.turn(POLL_SECONDS)
                counted(len(done), total, speed())
                if time.monotonic() > until and len(done) < total:
                    raise late(self.engine, self.deadline_seconds, total - len(done), total)
        except BaseException:
            self.driver.drop()
            raise

    def close(self) -> None:
        """Ends the environments' processes."""
        for host in self.environments.values():
            host.shutdown()


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
        """The host of environments and the deadline of an episode are by sub-agent."""
        self.engine, self.environments, self.episode_seconds = engine, environments, episode_seconds
        self._clock = clock
        self._open: dict[str, _Open] = {}  # by id of the episode
        self._late_at = {agent: dict[str, float]() for agent in environments}  # by sub-agent and id, first begun first
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
        self._take_observations(0.0 if self._sampling else timeout_seconds)
        if self._sampling:
            self._handle(self.engine.poll(0.0 if self._stepping or self._unsent else timeout_seconds))
        self._fail_late_episodes()

    def drop(self) -> None:
        """Ends all episodes without a word, after an error."""
        drop(self.engine, list(self._sampling))
        for uid, each in self._open.items():
            self.environments[each.episode.agent].close(uid)
            self._late_at[each.episode.agent].pop(uid, None)
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
        self._carry_out(episode.start())

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Sample):
                self._unsent.append(command)
                continue
            opened = self._open[command.episode]
            host, agent = self.environments[opened.episode.agent], opened.episode.agent
            if isinstance(command, Score):
                del self._open[command.episode]
                self._late_at[agent].pop(command.episode, None)
                opened.on_done(command.trajectory)
            elif isinstance(command, Close):
                self._abandon([child for child in opened.children if child in self._open])
                host.close(command.episode)
            elif isinstance(command, Step):
                self._stepping[command.episode] = agent
                host.step(command.episode, command.answer)
            elif isinstance(command, Delegate):
                opened.children.append(command.child.id)
                self._begin(command.child, partial(self._on_delegated, opened.episode))
            else:
                self._stepping[command.episode] = agent
                host.start(command.episode, command.prompt, command.seed)

    def _on_delegated(self, parent: Episode, trajectory: Trajectory) -> None:
        self._carry_out(parent.on_delegated(trajectory))

    def _abandon(self, ids: Sequence[str]) -> None:
        """Ends episodes without a word."""
        self._stop_calls(ids)
        for uid in ids:
            opened = self._open.pop(uid, None)
            if opened is not None:
                self._abandon(opened.children)
                self.environments[opened.episode.agent].close(uid)
                self._late_at[opened.episode.agent].pop(uid, None)

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
            read = _read(episode, result)
            if isinstance(read, Failure):
                self._carry_out(episode.on_failure(read))
            else:
                self._carry_out(episode.on_observation(read))

    def _handle(self, events: Sequence[Event]) -> None:
        for event in events:
            episode = self._sampling.get(event.uid)
            if episode is None:
                continue
            if isinstance(event, Partial):
                episode.on_partial(event)
                continue
            del self._sampling[event.uid]
            if isinstance(event, Finished):
                self._num_tokens += len(event.completion.token_ids)
                self._carry_out(episode.on_completion(event.completion))
            else:
                self._carry_out(episode.on_failure(event.failure))

    def _fail_late_episodes(self) -> None:
        """Fails the episodes whose time is over, which counts from the reset: before that they wait for a place."""
        now, late = self._clock(), list[str]()
        for agent, deadlines in self._late_at.items():
            for uid in self.environments[agent].begun():
                if uid in self._open:
                    deadlines.setdefault(uid, now + self.episode_seconds[agent])
            late += [uid for uid, _ in takewhile(lambda each: now > each[1], deadlines.items())]
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
    if isinstance(result, Failure):
        return result
    try:
        return episode.rules.codec.read(result)
    except DataError as error:
        return Failure("environment", str(error))
