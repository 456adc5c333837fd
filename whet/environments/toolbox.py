# SPDX-License-Identifier: Apache-2.0
"""The protocol of the tools around an environment. A plugin implements it; a run without tools never loads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from whet.environments.protocol import Environment
from whet.environments.running import EnvironmentSpec
from whet.registry import PARTS
from whet.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from whet.config.environment import ToolsConfig
    from whet.config.schema import DataConfig


class Loads(Protocol):
    """An environment as a process gets it, with tools around it or without."""

    def load(self) -> Callable[[Prompt], Environment]:
        """Returns a function that makes the environment of one episode."""


class Tools(Protocol):
    """The tools of a run."""

    @property
    def starts_servers(self) -> bool:
        """Tells whether the sessions of an episode start programs."""

    @property
    def for_template(self) -> dict[str, Any]:
        """The arguments of the chat template that describe the tools to the model."""

    def with_parser(self, template: str | None) -> Tools:
        """Returns the tools with the parser for a chat template; None stands for text without a template.

        Raises: ConfigError if the template shows no known format, or no tools at all."""

    def calls(
        self, tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], turn: int
    ) -> tuple[dict[str, Any], ...]:
        """Returns the calls in a turn, the `turn`-th of its episode.  Raises: ToolError if the parser raises."""

    def around(self, inner: EnvironmentSpec) -> Loads:
        """Wraps an environment in the tools."""


def tools_of(environment: ToolsConfig) -> Tools | None:
    """The tools of the config; None without any.  Raises: ConfigError; ToolError for an MCP server that does not start;
    RegistryError without the plugin."""
    found: Tools | None = PARTS["tools"].load()(environment) if environment.tools else None
    return found


def with_tools(data: DataConfig, environment: ToolsConfig) -> DataConfig:
    """The data section, with the run's tools among the arguments of the chat template.  Raises: as `tools_of`."""
    tools = tools_of(environment)
    if tools is None:
        return data
    return data.model_copy(update={"chat_template_kwargs": {**data.chat_template_kwargs, **tools.for_template}})
