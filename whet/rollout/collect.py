# SPDX-License-Identifier: Apache-2.0
"""Collects the episodes of training or of validation in an environment; a driver runs them concurrently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from whet.data.chat import ChatFormat
from whet.data.media import MediaReader
from whet.data.placeholders import has_parts, has_tag, place
from whet.data.written import warn_once
from whet.environments.host import Deadlines, EnvironmentHost, open_host
from whet.environments.protocol import Observation
from whet.environments.toolbox import Tools
from whet.errors import DataError
from whet.keyed import key
from whet.registry import ENVIRONMENTS
from whet.rollout.driver import Driver
from whet.rollout.episode import MAIN, Episode, EpisodeLimits, Rules
from whet.rollout.protocol import RolloutEngine, SamplingParams
from whet.types import Media, Message, Prompt, Trajectory

BARE_TAG = (
    "an observation of the environment has <image> or <video> in its text and no media: the model reads the tag as "
    "text (this is logged once); return Observation(..., media=(whet.data.media.image(...),)), or leave the tag out"
)


@dataclass(frozen=True)
class Stage:
    """The settings of an environment: its name, options, tools and deadlines, and the limits of its episodes."""

    environment: str = "single_turn"
    options: Mapping[str, Any] = field(default_factory=dict)
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    seconds: Deadlines = field(default_factory=Deadlines)  # for calls of the environment
    episode_seconds: float = 3600.0
    max_episodes: int | None = None
    tools: Tools | None = None  # with their parser
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # with the tools (`with_tools`)

    @property
    def is_silent(self) -> bool:
        """Tells whether the environment needs no host. It never replies; each episode ends after its first turn."""
        is_plain = self.tools is None and self.max_episodes is None
        return is_plain and bool(ENVIRONMENTS[self.environment].marks.get("silent"))

    def open(self) -> EnvironmentHost:
        """Opens the host of the environment.  Raises: the errors of `open_host`."""
        return open_host(
            self.environment, self.options, tools=self.tools, deadlines=self.seconds, max_episodes=self.max_episodes
        )


class Collector:
    """Runs episodes of one environment on one engine. If an environment or a request fails, only its episode ends."""

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
        driver: type[Driver] = Driver,
    ) -> None:
        """`agents` has the settings of sub-agents' environments by name. `hosts`, by the same names, replace hosts of
        this process. `reader` reads images and videos of observations. `driver` is the class that runs the episodes."""
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
                reader=reader,
                tools=each.tools,
            )
            for name, each in stages.items()
        }
        seconds = {name: each.episode_seconds for name, each in stages.items()}
        self.driver = driver(engine, self.environments, seconds, deadline_seconds)

    def episodes(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, *, step: int, purpose: str = "rollout"
    ) -> list[Episode]:
        """Makes `n` episodes of each prompt, in order. `step` and `purpose` are in the keys of random draws."""
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
        """Samples `n` unscored trajectories of each prompt, in order.  Raises: DeadlineError; errors of the engine."""
        episodes, done = self.episodes(prompts, n, params, step=step, purpose=purpose), dict[str, Trajectory]()
        whole, total = self.driver.promise(), len(episodes)

        def note(trajectory: Trajectory) -> None:
            done[trajectory.uid] = trajectory
            if len(done) == total:
                whole.set_result(None)

        if episodes:
            self.driver.call(lambda: self.driver.add(episodes, note))
            self.driver.wait(whole, lambda: (len(done), total))
        found = [done[episode.uid] for episode in episodes]
        return [found[start : start + n] for start in range(0, len(found), n)]

    def close(self) -> None:
        """Ends the driver and the environments' processes."""
        self.driver.close()
        for host in self.environments.values():
            host.shutdown()


@dataclass(eq=False)
class TemplateCodec(ChatFormat):
    """Converts between the tokens of an episode and its messages."""

    tools: Tools | None = None  # with the parser of their calls; `chat_template_kwargs` describe them to the model

    def decode(self, token_ids: Sequence[int]) -> str:
        return cast(str, self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def calls(self, token_ids: Sequence[int], turn: int) -> tuple[Mapping[str, Any], ...]:
        return () if self.tools is None else self.tools.calls(self.tokenizer, token_ids, turn)

    def read(self, observation: Observation) -> Observation:
        """Converts images and videos of the observation to content parts; counts their tokens.  Raises: DataError."""
        if any(has_parts(task.messages) for task in observation.tasks):
            raise DataError("task for a sub-agent", "has images or videos", "only text", "describe them in the text")
        if observation.media or has_parts(observation.messages):
            return self._with_media(observation)
        if self.reader is not None and has_tag(observation.messages, self.reader.kinds):
            warn_once(BARE_TAG)  # no error: the tag may be plain text
        return observation

    def _with_media(self, observation: Observation) -> Observation:
        if self.reader is None and all("tool_call_id" in message.fields for message in observation.messages):
            warn_once("a tool gave an image, but the model reads only text: it gets the text [image] (logged once)")
            return replace(observation, messages=tuple(map(_as_text, observation.messages)), media=())
        if self.reader is None:
            raise DataError("observation", "has images or videos", "text, which the model reads", "leave them out")
        given, owner = [(each.kind, each) for each in observation.media], "observation that the environment returned"
        placed, values = place(observation.messages, given, self.reader.kinds, owner)
        media = tuple(self.reader.read(*value) for value in values)
        return replace(observation, messages=placed, media=media)

    def opening(self, messages: Sequence[Message], media: Sequence[Media] = ()) -> list[int]:
        return self.encode_texts([self.text(messages, media)])[0]


def _as_text(message: Message) -> Message:
    """Replaces each image of the message by `[image]`, for text models whose tools return images."""
    return replace(message, content="".join(str(part.get("text", f"[{part['type']}]")) for part in message.parts))
