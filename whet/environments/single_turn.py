# SPDX-License-Identifier: Apache-2.0
"""The environment of tasks with one turn: a prompt and a response."""

from __future__ import annotations

from whet.environments.protocol import ENDS, Observation
from whet.registry import register_environment
from whet.types import Prompt


@register_environment("single_turn", pure=True, max_turns=1, silent=True)
class SingleTurn:
    """An environment whose episode ends after the first turn. It is `silent`: as it says nothing, nobody runs it."""

    def __init__(self, prompt: Prompt) -> None:
        pass

    def step(self, answer: str) -> Observation:
        """Returns the end of the episode."""
        return ENDS
