# SPDX-License-Identifier: Apache-2.0
"""The driver of episodes: runs them side by side, none waiting for another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from whet.data.chat import as_text, encode_continuation, encode_rendered, encode_texts, render_chat
from whet.environments.host import Deadlines, EnvironmentHost, open_host
from whet.keyed import key
from whet.metrics import counted
from whet.rollout.episode import Close, Command, Episode, Rules, Sample, Score, Step
from whet.rollout.protocol import POLL_SECONDS, Event, Finished, Partial, RolloutEngine, SamplingParams, drop, late
from whet.types import Failure, Message, Prompt, Trajectory, Turn


class TemplateCodec:
    """The tokenizer and its chat template; without the template, text follows text."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        apply_chat_template: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.apply_chat_template = tokenizer, apply_chat_template
        self.chat_template_kwargs = chat_template_kwargs or {}

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response, special tokens left out."""
        return cast(str, self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation up to where the model's next turn begins.  Raises: DataError."""
        if self.apply_chat_template:
            options = self.chat_template_kwargs
            text = render_chat(self.tokenizer, messages, add_generation_prompt=True, chat_template_kwargs=options)
            return encode_rendered(self.tokenizer, [text])[0]
        text = "".join(str(message.content) for message in messages)
        return encode_texts(self.tokenizer, [text], add_special_tokens=True)[0]

    def continuation(self, before: Sequence[Message], new: Sequence[Message], turn: Turn) -> list[int]:
        """The ids between a sampled turn and the next.  Raises: DataError."""
        if self.apply_chat_template:
            return encode_continuation(
                self.tokenizer, before, new, turn=turn, chat_template_kwargs=self.chat_template_kwargs
            )
        text = as_text(self.tokenizer, "".join(str(message.content) for message in new), self.chat_template_kwargs)
        return encode_rendered(self.tokenizer, [text])[0]


class Collector:
    """Runs episodes of one environment on one engine. A failure of an environment or a request ends its own episode."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        environment: str = "single_turn",
        environment_options: Mapping[str, Any] | None = None,
        max_turns: int = 8,
        apply_chat_template: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        seed: int = 0,
        deadline_seconds: float = 3600.0,
        episode_seconds: float = 3600.0,
        environment_seconds: Deadlines | None = None,
    ) -> None:
        self.max_turns, self.seed = max_turns, seed
        self.environments = open_host(environment, environment_options, deadlines=environment_seconds)
        self.codec = TemplateCodec(
            tokenizer, apply_chat_template=apply_chat_template, chat_template_kwargs=chat_template_kwargs
        )
        self.deadline_seconds = deadline_seconds
        self.driver = Driver(engine, self.environments, episode_seconds)

    @property
    def engine(self) -> RolloutEngine:
        """The engine that its episodes are sampled by."""
        return self.driver.engine

    def episodes(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, *, step: int, purpose: str = "rollout"
    ) -> list[Episode]:
        """n episodes of each prompt, in order; `step` and `purpose` name their random draws."""
        rules = Rules(self.codec, params, self.seed, step, purpose, self.max_turns)
        seeds = [key(self.seed, "environment", purpose, step, prompt.uid) for prompt in prompts]
        return [
            Episode(prompt, sample, rules, seed)
            for prompt, seed in zip(prompts, seeds, strict=True)
            for sample in range(n)
        ]

    def collect(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, *, step: int, purpose: str = "rollout"
    ) -> list[list[Trajectory]]:
        """n trajectories of each prompt in order, not scored yet.  Raises: DeadlineError; what the engine raises."""
        episodes = self.episodes(prompts, n, params, step=step, purpose=purpose)
        done, total, until = dict[str, Trajectory](), len(episodes), time.monotonic() + self.deadline_seconds
        try:
            self.driver.add(episodes, lambda trajectory: done.update({trajectory.uid: trajectory}))
            while len(done) < total:
                self.driver.turn(POLL_SECONDS)
                counted(len(done), total)
                if time.monotonic() > until and len(done) < total:
                    raise late(self.engine, self.deadline_seconds, total - len(done), total)
        except BaseException:
            self.driver.drop()
            raise
        return by_prompt([done[episode.uid] for episode in episodes], n)

    def close(self) -> None:
        """Ends the environments' processes."""
        self.environments.shutdown()


def by_prompt(trajectories: Sequence[Trajectory], n: int) -> list[list[Trajectory]]:
    """Splits trajectories into those of each prompt."""
    return [list(trajectories[start : start + n]) for start in range(0, len(trajectories), n)]


@dataclass(frozen=True)
class _Open:
    episode: Episode
    on_done: Callable[[Trajectory], None]
    late_at: float


class Driver:
    """Carries out the commands of episodes, which may be added at any time. One thread owns it."""

    def __init__(
        self,
        engine: RolloutEngine,
        environments: EnvironmentHost,
        episode_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.environments, self.episode_seconds = engine, environments, episode_seconds
        self._clock = clock
        self._open: dict[str, _Open] = {}  # by id of the episode, the oldest first
        self._unsent = deque[Sample]()
        self._sampling: dict[str, Episode] = {}  # by the uid of their request
        self._stepping: set[str] = set()  # ids of episodes whose environment has the turn

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

    def add(self, episodes: Sequence[Episode], on_done: Callable[[Trajectory], None]) -> None:
        """Begins episodes; `on_done` gets the trajectory of each."""
        for episode in episodes:
            self._open[episode.id] = _Open(episode, on_done, self._clock() + self.episode_seconds)
            self._carry_out(episode.start())

    def turn(self, timeout_seconds: float) -> None:
        """Sends requests, and waits for observations and completions up to `timeout_seconds`.

        Raises: what the engine raises."""
        self._send()
        self._take_observations(0.0 if self._sampling else timeout_seconds)
        self._take_completions(0.0 if self._stepping or self._unsent else timeout_seconds)
        self._fail_late_episodes()

    def drop(self) -> None:
        """Ends all episodes without a word, after an error."""
        drop(self.engine, list(self._sampling))
        for uid in self._open:
            self.environments.close(uid)
        self._open, self._sampling, self._stepping = {}, {}, set()
        self._unsent.clear()

    def note_partials(self) -> None:
        """Lets every episode note the tokens that its running request has so far, for a checkpoint."""
        self.engine.pause()
        events = self.engine.poll(0.0)
        self.engine.resume()
        self._handle(events)

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Sample):
                self._unsent.append(command)
            elif isinstance(command, Score):
                self._open.pop(command.episode).on_done(command.trajectory)
            elif isinstance(command, Close):
                self.environments.close(command.episode)
            elif isinstance(command, Step):
                self._stepping.add(command.episode)
                self.environments.step(command.episode, command.answer)
            else:
                self._stepping.add(command.episode)
                self.environments.start(command.episode, command.prompt, command.seed)

    def _send(self) -> None:
        """Submits requests until the engine is full."""
        while self._unsent and self.engine.submit(self._unsent[0].request):
            sample = self._unsent.popleft()
            self._sampling[sample.request.uid] = self._open[sample.episode].episode

    def _take_observations(self, timeout_seconds: float) -> None:
        if not self._stepping:
            return
        for uid, result in self.environments.poll(timeout_seconds):
            self._stepping.discard(uid)
            episode = self._open[uid].episode
            if isinstance(result, Failure):
                self._carry_out(episode.on_failure(result))
            else:
                self._carry_out(episode.on_observation(result))

    def _take_completions(self, timeout_seconds: float) -> None:
        if self._sampling:
            self._handle(self.engine.poll(timeout_seconds))

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
                self._carry_out(episode.on_completion(event.completion))
            else:
                self._carry_out(episode.on_failure(event.failure))

    def _fail_late_episodes(self) -> None:
        """Fails the episodes whose time is over."""
        now = self._clock()
        late = [each.episode for each in takewhile(lambda each: now > each.late_at, self._open.values())]
        if not late:
            return
        ids = {episode.id for episode in late}
        requests = [uid for uid, episode in self._sampling.items() if episode.id in ids]
        self.engine.abort(requests)  # others go on: what comes of these is not listened to
        for uid in requests:
            del self._sampling[uid]
        self._unsent = deque(sample for sample in self._unsent if sample.episode not in ids)
        self._stepping -= ids
        why = f"the episode took longer than {self.episode_seconds:g} s"
        for episode in late:
            self._carry_out(episode.on_failure(Failure("environment", why, timed_out=True)))
