# SPDX-License-Identifier: Apache-2.0
"""The config of environments and of the limits of their episodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PositiveFloat, PositiveInt

from whet.config.section import Choice, Values, key
from whet.config.tools import ToolsConfig
from whet.registry import ENVIRONMENTS

OnLimit = Literal["fail", "truncate"]


class StageConfig(ToolsConfig):
    """An environment and the limits of its episodes."""

    name: Annotated[str, Choice(ENVIRONMENTS, "options")] = key(
        "single_turn", "registered environment, or path/file.py:function"
    )
    options: Values = key({}, "options of the environment")
    max_turns: PositiveInt = key(8, "most turns of an episode")
    max_turn_tokens: PositiveInt | None = key(None, "most tokens of a turn; unset: the tokens left for the response")
    max_episode_tokens: PositiveInt | None = key(
        None, "most tokens that the model writes in an episode; unset: no limit"
    )
    max_episodes: PositiveInt | None = key(
        None, "most episodes at a time, later ones wait; unset: 256 where each has a process of its own, else no limit"
    )
    reset_seconds: PositiveFloat = key(120.0, "deadline of the environment's reset, in seconds")
    step_seconds: PositiveFloat = key(60.0, "deadline of one step of the environment, in seconds")
    episode_seconds: PositiveFloat = key(3600.0, "deadline of an episode, in seconds")


class EnvironmentConfig(StageConfig):
    """The environment, which gives observations between the turns of the model."""

    agents: dict[str, StageConfig] = key({}, "environments of sub-agents, by name; a task names its sub-agent")
    on_timeout: OnLimit = key("fail", "an episode past a deadline: fail, or truncate it to the turns that it has")
    on_overflow: OnLimit = key("truncate", "an observation without room in the context: fail, or truncate the episode")

    @property
    def label(self) -> str:
        """The name in metrics: the registered one, or that of the class."""
        return ENVIRONMENTS[self.name].name.rpartition(":")[2]
