# SPDX-License-Identifier: Apache-2.0
"""Rollouts for tests, in an environment that the test names, without a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from whet.data.loader import PromptSource
from whet.data.media import MediaReader
from whet.environments.host import Deadlines, open_host
from whet.environments.toolbox import Tools
from whet.metrics import Metrics
from whet.registry import ENVIRONMENTS
from whet.rollout.codec import TemplateCodec
from whet.rollout.driver import Driver
from whet.rollout.episode import MAIN, EpisodeLimits, Stage
from whet.rollout.protocol import SamplingParams
from whet.rollout.rollouts import Rollouts, SampledTrajectories
from whet.types import Prompt, Scorer, Trajectory


@dataclass(frozen=True)
class World:
    """An environment, and the settings of its episodes."""

    environment: str = "single_turn"
    options: Mapping[str, Any] = field(default_factory=dict)
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    seconds: Deadlines = field(default_factory=Deadlines)  # for calls of the environment
    max_episodes: int | None = None
    tools: Tools | None = None  # with their parser
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_silent(self) -> bool:
        is_plain = self.tools is None and self.max_episodes is None
        return is_plain and bool(ENVIRONMENTS[self.environment].marks.get("silent"))


class Playing(Rollouts):
    """Rollouts of an engine in a world."""

    def __init__(
        self,
        engine: Any,
        tokenizer: PreTrainedTokenizerBase,
        *,
        world: World | None = None,
        agents: Mapping[str, World] | None = None,
        apply_chat_template: bool = True,
        reader: MediaReader | None = None,
        deadline_seconds: float = 3600.0,
        in_thread: bool = False,
        prompts: PromptSource | None = None,
        scorer: Scorer | None = None,
        n: int = 1,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> None:
        worlds = {MAIN: world or World(), **(agents or {})}
        hosts = {
            name: open_host(
                each.environment,
                each.options,
                tools=each.tools,
                deadlines=each.seconds,
                max_episodes=each.max_episodes,
            )
            for name, each in worlds.items()
            if not each.is_silent
        }
        stages = {}
        for name, each in worlds.items():
            codec = TemplateCodec(
                tokenizer,
                apply_chat_template=apply_chat_template,
                chat_template_kwargs=each.chat_template_kwargs,
                reader=reader,
                tools=each.tools,
            )
            stages[name] = Stage(codec, each.limits, each.is_silent)
        driver = Driver(engine, hosts, deadline_seconds, in_thread=in_thread)
        source = PromptSource() if prompts is None else prompts
        super().__init__(source, driver, stages, scorer, tokenizer, n=n, params=params or SamplingParams(8), **options)

    def start(self, n: int, *, step: int, metrics: Metrics | None = None) -> SampledTrajectories:
        """Starts a step like `Rollouts.start`; `metrics` has the metrics of the last step."""
        self.metrics = Metrics() if metrics is None else metrics
        return super().start(n, step=step, metrics=self.metrics)

    def collect(
        self, prompts: Sequence[Prompt], n: int, params: SamplingParams, *, step: int, purpose: str = "rollout"
    ) -> list[list[Trajectory]]:
        """For each prompt its trajectories without scores."""
        groups = self.sample(prompts, n, params, step=step, purpose=purpose, is_scored=False)
        return [list(group.trajectories) for group in groups]
