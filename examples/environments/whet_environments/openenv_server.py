# SPDX-License-Identifier: Apache-2.0
"""Serves an environment of whet as an OpenEnv server: any OpenEnv client plays it.

    pip install './examples/environments[openenv-server]'
    python -m whet_environments.openenv_server frozen_lake --option size=3 --port 8000

An action has the `text` of a turn. An observation has the `text` that a player reads, and all that whet's observations
have. A reset takes `seed` (without one a session begins with 0 and counts), and `messages`, `ground_truth` and
`extra_info` of a prompt. Each WebSocket is a session; environments run as they do in training, each call with a
deadline. It listens on 127.0.0.1, since whoever reaches it may play.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import queue
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from pydantic import Field

from whet.errors import ConfigError, WhetError

try:
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation as OpenEnvObservation, State
except ImportError as error:
    what = f"serving as OpenEnv needs openenv-core ({error}): pip install './examples/environments[openenv-server]'"
    raise (SystemExit if __name__ == "__main__" else ConfigError)(what) from error

from whet.environments.host import Deadlines, EnvironmentHost, open_host
from whet.environments.protocol import Answer, Observation
from whet.plugins.serving.command import read_options
from whet.types import Failure, Message, Prompt

POLL_SECONDS = 0.005  # the longest that a call waits while another one runs
IDLE_SECONDS = 0.2  # between looks at processes that end


class WhetAction(Action):
    """A turn."""

    text: str
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)
    token_ids: list[int] = Field(default_factory=list)
    finish_reason: str = "stop"


class WhetObservation(OpenEnvObservation):
    """An observation of whet; `text` is the text of its messages."""

    text: str = ""
    messages: list[dict[str, Any]] = Field(default_factory=list)
    truncated: bool = False
    context: str = "append"
    fields: dict[str, Any] = Field(default_factory=dict)
    state_key: str | None = None
    max_tokens: int | None = None
    player: str = ""
    rewards: dict[str, float] = Field(default_factory=dict)
    is_trained: bool = True


class Pump(threading.Thread):
    """The one thread that owns a host; sessions give it calls, which end at the latest by the host's deadlines."""

    def __init__(self, host: EnvironmentHost) -> None:
        super().__init__(daemon=True)
        self._host, self._calls = host, queue.SimpleQueue[tuple[str, str, tuple[Any, ...]] | None]()
        self._waiting: dict[str, Future[Observation | Failure]] = {}
        self.start()

    async def ask(self, verb: str, uid: str, *arguments: Any) -> Observation | Failure:
        """The outcome of `start` or `step`."""
        future = self._waiting[uid] = Future[Observation | Failure]()
        self._calls.put((verb, uid, arguments))
        return await asyncio.wrap_future(future)

    def forget(self, uid: str) -> None:
        """Closes an episode, without waiting."""
        self._calls.put(("close", uid, ()))

    def stop(self) -> None:
        """Ends the thread and the environments."""
        self._calls.put(None)
        self.join(10.0)

    def run(self) -> None:
        """Passes calls to the host, and outcomes to the calls that wait."""
        while True:
            try:
                call = self._calls.get(timeout=0.0 if self._waiting else IDLE_SECONDS)
            except queue.Empty:
                for uid, outcome in self._host.poll(POLL_SECONDS if self._waiting else 0.0):
                    self._give(uid, outcome)
                continue
            if call is None:
                self._host.shutdown()
                return
            verb, uid, arguments = call
            if verb == "close":
                self._waiting.pop(uid, None)
            try:
                getattr(self._host, verb)(uid, *arguments)
            except Exception as error:  # starting a process may fail
                self._give(uid, Failure("environment", str(error)))

    def _give(self, uid: str, outcome: Observation | Failure) -> None:
        future = self._waiting.pop(uid, None)
        if future is not None and not future.cancelled():
            future.set_result(outcome)


class Served(Environment[WhetAction, WhetObservation, State]):
    """A session: one episode after another."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, pump: Pump, name: str, uids: itertools.count[int]) -> None:
        super().__init__()
        self._pump, self._name, self._uids = pump, name, uids
        self._uid, self._next_seed = "", 0
        self._state, self._is_over = State(), True

    async def reset_async(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
        ground_truth: Any = None,
        extra_info: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> WhetObservation:
        """Begins an episode, with an empty prompt unless there is one.  Raises: RuntimeError where the environment
        fails."""
        self.close()
        used = self._next_seed if seed is None else seed
        self._next_seed = used + 1
        self._uid = str(next(self._uids))
        self._state = State(episode_id=episode_id or self._uid, step_count=0)
        given = tuple(Message(**each) for each in messages) or (Message("user", ""),)
        prompt = Prompt(f"0:{used}", used, given, (1,), "openenv", ground_truth, extra_info=dict(extra_info or {}))
        return self._read(await self._pump.ask("start", self._uid, prompt, used), None)

    async def step_async(self, action: WhetAction, timeout_s: float | None = None, **_: Any) -> WhetObservation:
        """Plays a turn.  Raises: RuntimeError after the end, or where the environment fails."""
        if self._is_over:
            raise RuntimeError("the episode is over, or has not begun; reset begins one")
        turn = action.model_dump(exclude={"metadata"})
        calls, tokens = tuple(turn.pop("tool_calls")), tuple(turn.pop("token_ids"))
        self._state.step_count += 1
        outcome = await self._pump.ask("step", self._uid, Answer(**turn, tool_calls=calls, token_ids=tokens))
        return self._read(outcome, outcome.reward if isinstance(outcome, Observation) else None)

    def reset(self, *_: Any, **__: Any) -> WhetObservation:
        """Is not called: the server calls `reset_async`."""
        raise NotImplementedError("use reset_async")

    def step(self, *_: Any, **__: Any) -> WhetObservation:
        """Is not called: the server calls `step_async`."""
        raise NotImplementedError("use step_async")

    @property
    def state(self) -> State:
        """The episode's id and number of turns."""
        return self._state

    def close(self) -> None:
        """Ends the episode."""
        uid, self._uid, self._is_over = self._uid, "", True
        if uid:
            self._pump.forget(uid)

    def _read(self, outcome: Observation | Failure, reward: float | None) -> WhetObservation:
        if isinstance(outcome, Failure):
            self.close()
            raise RuntimeError(f"the environment {self._name} failed: {outcome.message}")
        if outcome.tasks or outcome.media:
            self.close()
            what = "gives tasks to sub-agents" if outcome.tasks else "has media in its observations"
            raise RuntimeError(f"the environment {self._name} {what}, for which OpenEnv has no form")
        self._is_over = outcome.done or outcome.truncated
        names = ("truncated", "context", "state_key", "max_tokens", "player", "is_trained")
        return WhetObservation(
            done=self._is_over,
            reward=reward,
            text="\n\n".join(str(message.content) for message in outcome.messages),
            messages=[asdict(message) for message in outcome.messages],
            fields=dict(outcome.fields),
            rewards=dict(outcome.rewards),
            **{name: getattr(outcome, name) for name in names},
        )


def make_app(name: str, options: Mapping[str, Any], *, max_sessions: int, step_seconds: float) -> tuple[Any, Pump]:
    """The FastAPI application of an environment, and the thread that plays it.  Raises: RegistryError, ConfigError."""
    pump = Pump(open_host(name, options, deadlines=Deadlines(step=step_seconds), max_episodes=max_sessions))
    uids = itertools.count(1)
    app = create_fastapi_app(
        lambda: Served(pump, name, uids), WhetAction, WhetObservation, max_concurrent_envs=max_sessions
    )
    return app, pump


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.  Raises: ConfigError where the port is taken, or the host is not of this machine."""
    try:
        return socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            "--port", f"{port} of {host}: {error}", "a free port of this machine", "choose another one, or 0"
        ) from error


def main() -> int:
    """Serves until it is interrupted: by Ctrl-C without a traceback."""
    parser = argparse.ArgumentParser(description="Serves an environment of whet as an OpenEnv server.")
    parser.add_argument("name", help="a name that `whet env list` prints, or path/file.py:Class")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of the environment")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one")
    parser.add_argument("--max-sessions", type=int, default=64, help="episodes at a time")
    parser.add_argument("--step-seconds", type=float, default=60.0, help="deadline of a step")
    given = parser.parse_args()
    try:
        limits = {"max_sessions": given.max_sessions, "step_seconds": given.step_seconds}
        listening = listen(given.host, given.port)
        app, pump = make_app(given.name, read_options(given.option), **limits)
    except WhetError as error:
        parser.error(str(error))
    with listening, suppress(KeyboardInterrupt):  # uvicorn raises it once more after its own end
        print(f"{given.name} is served at http://{given.host}:{listening.getsockname()[1]}", flush=True)
        # OpenEnv's server raises for every client that closes first; uvicorn would write each as an error.
        uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listening])
    pump.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
