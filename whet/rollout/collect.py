# SPDX-License-Identifier: Apache-2.0
"""The synchronous driver of episodes: runs them side by side, none waiting for another, until all are over."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from transformers import PreTrainedTokenizerBase

from whet.data.chat import encode_continuation, encode_rendered
from whet.environments.protocol import Environment, Observation
from whet.registry import ENVIRONMENTS
from whet.rewards.adapter import describe
from whet.rollout.episode import Close, Command, Episode, Reset, Rules, Sample, Score, Step
from whet.rollout.protocol import POLL_SECONDS, Failed, Finished, RolloutEngine, SamplingParams, drop, late
from whet.types import Failure, Message, Prompt, Trajectory, Turn

Result = tuple[str, Observation | Failure]  # of a reset or a step: the episode's uid, and what came of it


class Environments(Protocol):
    """The place where environments run."""

    def carry_out(self, command: Reset | Step | Close) -> None:
        """Begins a reset, a step or a close; its result comes out of `poll`."""
        ...

    def poll(self, timeout_seconds: float) -> list[Result]:
        """Returns results as soon as there are any, at the latest after `timeout_seconds`."""
        ...


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

    def continuation(self, before: Sequence[Message], new: Sequence[Message], turn: Turn) -> list[int]:
        """The ids between a sampled turn and the next.  Raises: DataError."""
        if self.apply_chat_template:
            return encode_continuation(
                self.tokenizer, before, new, turn=turn, chat_template_kwargs=self.chat_template_kwargs
            )
        return encode_rendered(self.tokenizer, "".join(str(message.content) for message in new))


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
    ) -> None:
        self.engine, self.max_turns, self.seed = engine, max_turns, seed
        self.environments: Environments = InlineEnvironments(environment, environment_options or {})
        self.codec = TemplateCodec(
            tokenizer, apply_chat_template=apply_chat_template, chat_template_kwargs=chat_template_kwargs
        )
        self.deadline_seconds = deadline_seconds

    def collect(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, *, step: int, purpose: str = "rollout"
    ) -> list[list[Trajectory]]:
        """Samples n trajectories for each prompt, not scored yet, and returns them in order.

        Raises: DeadlineError; what the engine raises."""
        rules = Rules(self.codec, params, self.seed, step, purpose, self.max_turns)
        episodes = [Episode(prompt, sample, rules) for prompt in prompts for sample in range(n)]
        done = self._run({episode.uid: episode for episode in episodes})
        ordered = [done[episode.uid] for episode in episodes]
        return [ordered[start : start + n] for start in range(0, len(ordered), n)]

    def _run(self, episodes: Mapping[str, Episode]) -> dict[str, Trajectory]:
        """The trajectories of all episodes, by uid."""
        deadline = time.monotonic() + self.deadline_seconds
        commands = deque(command for episode in episodes.values() for command in episode.start())
        unsent, running = deque[Sample](), dict[str, Episode]()  # the latter by the uid of the request
        stepping: set[str] = set()  # episodes whose environment is at work
        done: dict[str, Trajectory] = {}
        try:
            while len(done) < len(episodes):
                while commands:
                    match commands.popleft():
                        case Sample() as command:
                            unsent.append(command)
                        case Score(trajectory):
                            done[trajectory.uid] = trajectory
                        case command:
                            self.environments.carry_out(command)
                            if not isinstance(command, Close):
                                stepping.add(command.uid)
                while unsent and self.engine.submit(unsent[0].request):
                    sample = unsent.popleft()
                    running[sample.request.uid] = episodes[sample.uid]
                for uid, result in self.environments.poll(0.0 if running else POLL_SECONDS) if stepping else []:
                    stepping.discard(uid)
                    commands += _after(episodes[uid], result)
                if not commands and running:
                    commands += self._sampled(running, POLL_SECONDS if not stepping else 0.0)
                if time.monotonic() > deadline:
                    raise late(self.engine, self.deadline_seconds, len(episodes) - len(done), len(episodes))
        except BaseException:
            drop(self.engine, list(running))
            raise
        return done

    def _sampled(self, running: dict[str, Episode], timeout_seconds: float) -> list[Command]:
        """The commands that follow from the engine's events."""
        commands: list[Command] = []
        for event in self.engine.poll(timeout_seconds):
            if isinstance(event, Finished) and event.uid in running:
                commands += running.pop(event.uid).on_completion(event.completion)
            elif isinstance(event, Failed) and event.uid in running:
                commands += running.pop(event.uid).on_failure(event.failure)
        return commands


class InlineEnvironments:
    """Environments that step in this process, in the call."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        entry = ENVIRONMENTS[name]
        self._make = entry.load()
        self._options = entry.resolve_options(options, "environment.options")
        self._living: dict[str, Environment] = {}
        self._results: list[Result] = []

    def carry_out(self, command: Reset | Step | Close) -> None:
        """Does it now. An exception of the environment is a failure of its episode."""
        uid = command.uid
        try:
            match command:
                case Reset(prompt=prompt):
                    self._living[uid] = self._make(prompt, **self._options)
                    self._results.append((uid, Observation(done=False)))
                case Step(text=text):
                    self._results.append((uid, self._living[uid].step(text)))
                case Close():
                    self._living.pop(uid, None)
        except Exception as error:  # other people's code
            self._results.append((uid, Failure("environment", describe(error))))

    def poll(self, timeout_seconds: float) -> list[Result]:
        """The results since the last call."""
        results, self._results = self._results, []
        return results


def _after(episode: Episode, result: Observation | Failure) -> list[Command]:
    return episode.on_failure(result) if isinstance(result, Failure) else episode.on_observation(result)
