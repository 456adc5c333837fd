# SPDX-License-Identifier: Apache-2.0
"""A question and an answer."""

from __future__ import annotations

from whet.environments.protocol import Observation
from whet.registry import register_environment
from whet.types import Prompt


@register_environment("single_turn", pure=True)
class SingleTurn:
    """The episode ends with the first answer."""

    def __init__(self, prompt: Prompt) -> None:
        pass

    def step(self, answer: str) -> Observation:
        """Always the end."""
        return Observation(done=True)
