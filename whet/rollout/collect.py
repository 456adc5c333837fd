# SPDX-License-Identifier: Apache-2.0
"""The synchronous driver of episodes: runs them side by side, none waiting for another, until all are over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from whet.data.chat import as_text, encode_continuation, encode_rendered, encode_texts, render_chat
from whet.environments.host import Deadlines, open_host
from whet.keyed import key
from whet.metrics import counted
from whet.rollout.episode import Close, Command, Episode, Rules, Sample, Score, Step
from whet.rollout.protocol import POLL_SECONDS, Failed, Finished, RolloutEngine, SamplingParams, drop, late
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
        self.engine, self.max_turns, self.seed = engine, max_turns, seed
        self.environments = open_host(environment, environment_options, deadlines=environment_seconds)
        self.codec = TemplateCodec(
            tokenizer, apply_chat_template=apply_chat_template, chat_template_kwargs=chat_template_kwargs
        )
        self.deadline_seconds, self.episode_seconds = deadline_seconds, episode_seconds

    def collect(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, *, step: int, purpose: str = "rollout"
    ) -> list[list[Trajectory]]:
        """n trajectories of each prompt in order, not scored yet.  Raises: DeadlineError; what the engine raises."""
        rules = Rules(self.codec, params, self.seed, step, purpose, self.max_turns)
        episodes = []
        for prompt in prompts:
            seed = key(self.seed, "environment", purpose, step, prompt.uid)
            episodes += [Episode(prompt, sample, rules, seed) for sample in range(n)]
        done = _Running(self, episodes).trajectories()
        return [done[start : start + n] for start in range(0, len(done), n)]

    def close(self) -> None:
        """Ends the environments' processes."""
        self.environments.shutdown()


class _Running:
    """The episodes of one call, and what they wait for."""

    def __init__(self, collector: Collector, episodes: Sequence[Episode]) -> None:
        self.engine, self.environments, self._limits = collector.engine, collector.environments, collector
        self.episodes = {episode.uid: episode for episode in episodes}
        self.done: dict[str, Trajectory] = {}
        self._unsent = deque[Sample]()
        self._sampling: dict[str, Episode] = {}  # by the uid of their request
        self._stepping = 0  # resets and steps under way

    def trajectories(self) -> list[Trajectory]:
        """Runs all episodes to their end."""
        began, total = time.monotonic(), len(self.episodes)
        try:
            for episode in self.episodes.values():
                self._carry_out(episode.start())
            while len(self.done) < total:
                self._send()
                self._take_observations(0.0 if self._sampling else POLL_SECONDS)
                self._take_completions(0.0 if self._stepping or self._unsent else POLL_SECONDS)
                counted(len(self.done), total)
                seconds = time.monotonic() - began
                if seconds > self._limits.episode_seconds:
                    self._fail_all(f"the episode took longer than {self._limits.episode_seconds:g} s")
                if seconds > self._limits.deadline_seconds and len(self.done) < total:
                    raise late(self.engine, self._limits.deadline_seconds, total - len(self.done), total)
        except BaseException:
            drop(self.engine, list(self._sampling))
            for uid in self.episodes.keys() - self.done.keys():
                self.environments.close(uid)
            raise
        return [self.done[uid] for uid in self.episodes]

    def _carry_out(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Sample):
                self._unsent.append(command)
            elif isinstance(command, Score):
                self.done[command.trajectory.uid] = command.trajectory
            elif isinstance(command, Close):
                self.environments.close(command.uid)
            elif isinstance(command, Step):
                self._stepping += 1
                self.environments.step(command.uid, command.answer)
            else:
                self._stepping += 1
                self.environments.start(command.uid, command.prompt, command.seed)

    def _send(self) -> None:
        """Submits requests until the engine is full."""
        while self._unsent and self.engine.submit(self._unsent[0].request):
            sample = self._unsent.popleft()
            self._sampling[sample.request.uid] = self.episodes[sample.uid]

    def _take_observations(self, timeout_seconds: float) -> None:
        if not self._stepping:
            return
        for uid, result in self.environments.poll(timeout_seconds):
            self._stepping -= 1
            episode = self.episodes[uid]
            if isinstance(result, Failure):
                self._carry_out(episode.on_failure(result))
            else:
                self._carry_out(episode.on_observation(result))

    def _take_completions(self, timeout_seconds: float) -> None:
        if not self._sampling:
            return
        for event in self.engine.poll(timeout_seconds):
            if isinstance(event, Finished) and event.uid in self._sampling:
                self._carry_out(self._sampling.pop(event.uid).on_completion(event.completion))
            elif isinstance(event, Failed) and event.uid in self._sampling:
                self._carry_out(self._sampling.pop(event.uid).on_failure(event.failure))

    def _fail_all(self, why: str) -> None:
        """Ends the episodes that are not over."""
        drop(self.engine, list(self._sampling))
        self._sampling.clear()
        self._unsent.clear()
        self._stepping = 0
        for episode in self.episodes.values():
            self._carry_out(episode.on_failure(Failure("environment", why, timed_out=True)))
