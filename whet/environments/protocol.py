# SPDX-License-Identifier: Apache-2.0
"""What a rollout asks of an environment. One object is one episode; it is made for a prompt and stepped until done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from whet.types import Message


@dataclass(frozen=True)
class Observation:
    """What follows an answer: messages for the model to read, or the end of the episode."""

    done: bool
    messages: tuple[Message, ...] = ()
    reward: float = 0.0  # paid for the answer just given; the episode's score by the reward function comes on top
    fields: Mapping[str, Any] = field(default_factory=dict)  # kept with the trajectory: columns by name


class Environment(Protocol):
    """Registered as a class `Name(prompt, *, options...)`. An exception that `step` raises fails this episode alone."""

    def step(self, answer: str) -> Observation:
        """Reads the model's answer, special tokens removed."""
        ...
