# SPDX-License-Identifier: Apache-2.0
"""The protocol of tools around an environment. A plugin implements it. A run without tools never loads the plugin."""

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
    """Loads a class of environments, with or without tools around them, in the process that runs them."""

    def load(self) -> Callable[[Prompt], Environment]:
        """Returns a function that creates the environment of one episode."""


class Tools(Protocol):
    """The tools that a run puts around its environments."""

    @property
    def starts_servers(self) -> bool:
        """Tells whether the tools start programs in each episode."""

    @property
    def for_template(self) -> dict[str, Any]:
        """Returns the chat-template arguments that describe the tools to the model."""

    def with_parser(self, template: str | None) -> Tools:
        """Returns the tools with the parser for a chat template; `template=None` means text without a template.

        Raises: ConfigError if the template shows no known format, or no tools at all."""

    def calls(
        self, tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], turn: int
    ) -> tuple[dict[str, Any], ...]:
        """Parses the tool calls in turn number `turn` of an episode.  Raises: ToolError if the parser raises."""

    def around(self, inner: EnvironmentSpec) -> Loads:
        """Returns the environment `inner` with the tools around it."""


def tools_of(environment: ToolsConfig) -> Tools | None:
    """Returns the tools of the config; None if it has none.  Raises: ConfigError; ToolError for an MCP server that does
    not start; RegistryError without the plugin."""
    found: Tools | None = PARTS["tools"].load()(environment) if environment.tools else None
    return found


def with_tools(data: DataConfig, environment: ToolsConfig) -> DataConfig:
    """Adds the run's tools to the chat-template arguments of the data section.  Raises: as `tools_of`."""
    tools = tools_of(environment)
    if tools is None:
        return data
    return data.model_copy(update={"chat_template_kwargs": {**data.chat_template_kwargs, **tools.for_template}})
