# SPDX-License-Identifier: Apache-2.0
"""Two environments in the manner of OpenEnv's template and of its `coding_env`, and one of AgentSynth's, as servers.

python -m tests.environments.openenv_servers Walk 8000
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any, Literal

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class WalkAction(Action):
    """A direction and a number of cells."""

    direction: Literal["left", "right"]
    cells: int = 1


class WalkObservation(Observation):
    """The place and the goal, without text."""

    place: int
    goal: int


class Walk(Environment[WalkAction, WalkObservation, State]):
    """Walk along a line to the goal, whose place the seed draws."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, far: int = 5) -> WalkObservation:
        """Begins."""
        self.place, self.goal = 0, random.Random(seed).randint(1, far)
        return WalkObservation(place=0, goal=self.goal)

    def step(self, action: WalkAction, timeout_s: float | None = None, **_: Any) -> WalkObservation:
        """Walks."""
        self.place += action.cells if action.direction == "right" else -action.cells
        there = self.place == self.goal
        return WalkObservation(place=self.place, goal=self.goal, reward=int(there), done=there)

    @property
    def state(self) -> State:
        """Nothing."""
        return State()


class CodeAction(Action):
    """A program."""

    code: str


class CodeObservation(Observation):
    """The output of the code."""

    stdout: str = ""
    exit_code: int = 0


class Code(Environment[CodeAction, CodeObservation, State]):
    """Evaluates arithmetic; `sleep` waits long, `leave` ends the process."""

    def reset(self, seed: int | None = None, **_: Any) -> CodeObservation:
        """Begins."""
        return CodeObservation(stdout="ready")

    def step(self, action: CodeAction, timeout_s: float | None = None, **_: Any) -> CodeObservation:
        """Evaluates."""
        if action.code == "sleep":
            time.sleep(20.0)
        if action.code == "leave":
            import os

            os._exit(3)
        if action.code == "raise":
            raise ValueError("no such program")
        try:
            a, _, b = action.code.partition("+")
            return CodeObservation(stdout=str(int(a) + int(b)), reward=1.0)
        except ValueError as error:
            return CodeObservation(stdout=str(error), exit_code=1, reward=0.0)

    @property
    def state(self) -> State:
        """Nothing."""
        return State()


def database() -> tuple[Any, ...]:
    """AgentSynth's database of sales, with the classes of OpenEnv's tool calls."""
    from agentsynth.environments import SQLEnvironment
    from agentsynth.rl import AgentGym, to_openenv
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    return lambda: to_openenv(AgentGym(SQLEnvironment())), CallToolAction, CallToolObservation, 1


if __name__ == "__main__":
    name, port = sys.argv[1:]
    kinds = {"Walk": (Walk, WalkAction, WalkObservation, 8), "Code": (Code, CodeAction, CodeObservation, 1)}
    *classes, most = kinds[name] if name in kinds else database()
    uvicorn.run(create_fastapi_app(*classes, max_concurrent_envs=most), port=int(port), log_level="critical")
