# SPDX-License-Identifier: Apache-2.0
"""Tasks of verifiers (v1), scored by their own rewards: whet plays the turns, and a `vf.Trace` is made of them.

    pip install './examples/environments[verifiers]'
    whet env play verifiers --option taskset=my_package:MyTaskset

No harness, runtime or server of verifiers starts. A task has one turn; where the taskset comes with an `Env`, such as a
game, its `run` leads the conversation, and `Seat` stands where it expects an agent (verifiers 0.4, `agent.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from whet.environments.protocol import Answer, Observation
from whet.errors import ConfigError
from whet.options import Count, Positive
from whet.registry import load_target, register_environment
from whet.types import Message, Prompt

INSTALL = "pip install './examples/environments[verifiers]'"


@dataclass(frozen=True)
class Loaded:
    """A taskset in this process: its tasks, and the `Env` that plays them, None for one turn."""

    tasks: Sequence[Any]
    env: Any


_LOADED: dict[str, Loaded] = {}  # by taskset and its settings


@register_environment("verifiers", shared=True)
class Verifiers:
    """A task of verifiers: `taskset` is the name of an installed taskset or `package.module:Class`, `settings` its
    config, `env` the name of an `Env` to play it with in place of its own.

    The row's field `task` is the number, id or name of a task; without it the seed chooses one of the first
    `num_tasks`. The messages of the task replace the prompt of the row. The reward is the weighted sum of its rewards,
    paid on the last turn; fields are the rewards and metrics by name. Of an `Env` with several agents each is a player
    with rewards of its own, and fields begin with its name. A task that needs a runtime, tools or a container is
    refused.
    """

    def __init__(
        self,
        *,
        taskset: str,
        settings: Mapping[str, Any] | None = None,
        env: str = "",
        num_tasks: Count = 1000,
        max_turns: Count = 100,
        seconds: Positive = 50.0,
    ) -> None:
        if env and ":" in taskset:
            raise ConfigError(
                "environment.options.taskset", taskset, f"the name of an installed taskset with env={env}"
            )
        self.taskset, self.settings, self.env, self.num_tasks = taskset, dict(settings or {}), env, num_tasks
        self.max_turns, self.seconds = max_turns, seconds
        self.table: Table | None = None

    async def reset(self, prompt: Prompt, seed: int) -> Observation:
        """Begins a task.  Raises: ConfigError without the package or for what it cannot play, any error of the task."""
        loaded = load(self.taskset, self.settings, self.env, self.num_tasks)
        task = choose(loaded.tasks, prompt.extra_info.get("task"), seed)
        self.table = Table(loaded.env, task, self.max_turns)
        return await self._next(self.table)

    async def step(self, answer: Answer) -> Observation:
        """Gives the answer to the seat whose turn it is.  Raises: RuntimeError after the end, any error of the task."""
        if self.table is None or self.table.asked is None:
            raise RuntimeError("step was called after the end of the task, or before reset; call reset first")
        self.table.answer(answer)
        return await self._next(self.table)

    async def close(self) -> None:
        """Ends the task."""
        table, self.table = self.table, None
        if table is not None:
            await table.close()

    async def _next(self, table: Table) -> Observation:
        try:
            async with asyncio.timeout(self.seconds):
                return await table.next()
        except TimeoutError:
            raise TimeoutError(f"the task or its scoring took longer than {self.seconds:g} s") from None


class Table:
    """An episode: `play` runs as a task of the event loop and waits at its seats for answers."""

    def __init__(self, env: Any, task: Any, max_turns: int) -> None:
        self.task, self.env, self.max_turns = task, env, max_turns
        self.seats: dict[str, Seat] = {}
        self.traces: list[Any] = []
        self.asked: tuple[Observation, asyncio.Future[Answer]] | None = None
        self._waiting: asyncio.Queue[tuple[Observation, asyncio.Future[Answer]]] = asyncio.Queue()
        self._play = asyncio.ensure_future(self.play())

    def __getattr__(self, name: str) -> Seat:
        """The seat of an agent: `Env.run` asks for `agents.player`."""
        if name.startswith("_") or (self.env is not None and name not in self.env._agent_specs):
            raise AttributeError(name)
        return self.seats.setdefault(name, Seat(self, name))

    async def play(self) -> None:
        """Plays the task to its end."""
        from verifiers import v1 as vf

        if self.env is None:
            await self.agent.run(self.task)
            return
        await self.env.setup(self)
        await self.env.run(self.task, self)
        await self.env.finalize(self.task, vf.Episode(task=_described(self.task), traces=self.traces))

    async def ask(self, observation: Observation) -> Answer:
        """Waits for the answer to an observation."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((observation, future))
        return await future

    def answer(self, answer: Answer) -> None:
        """Answers the observation that `next` returned."""
        assert self.asked is not None
        self.asked[1].set_result(answer)
        self.asked = None

    async def next(self) -> Observation:
        """The next observation of any seat, or the end with the rewards."""
        waiting = asyncio.ensure_future(self._waiting.get())
        await asyncio.wait({waiting, self._play}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            self.asked = waiting.result()
            return self.asked[0]
        waiting.cancel()
        self._play.result()
        return self.end()

    def end(self) -> Observation:
        """The end: the rewards of all traces."""
        has_players = self.has_players
        rewards: dict[str, float] = {}
        fields: dict[str, Any] = {}
        for trace in self.traces:
            name = trace.agent.name
            rewards[name] = rewards.get(name, 0.0) + trace.reward
            found = {key: reward.score for key, reward in trace.rewards.items() if reward is not None}
            found |= {key: value for key, value in trace.metrics.items() if value is not None}
            fields |= {f"{name}/{key}" if has_players else key: value for key, value in found.items()}
        if has_players:
            return Observation(True, rewards=rewards, fields=fields)
        return Observation(True, reward=sum(rewards.values()), fields=fields)

    @property
    def has_players(self) -> bool:
        """Whether several agents play."""
        return self.env is not None and len(self.env._agent_specs) > 1

    async def close(self) -> None:
        """Ends `play`."""
        self._play.cancel()
        await asyncio.wait({self._play}, timeout=2.0)
        if self._play.done() and not self._play.cancelled():
            self._play.exception()  # it was told already


class Seat:
    """Stands for an agent of verifiers: the model that whet trains takes its turns."""

    def __init__(self, table: Table, name: str) -> None:
        self.name, self.trainable, self._table = name, True, table

    async def run(self, task: Any, **_: Any) -> Any:
        """Plays one turn of a task.  Returns its trace, scored."""
        async with self.interaction(task) as talk:
            await talk.turn()
        return talk.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator[Talk]:
        """A conversation; its end scores it."""
        check_playable(task)
        talk = Talk(self._table, self, task)
        yield talk
        await talk.close()


class Talk:
    """Stands for `vf.Interaction`: `turn` gives a message and returns the reply; `trace` has all of them."""

    def __init__(self, table: Table, seat: Seat, task: Any) -> None:
        from verifiers import v1 as vf
        from verifiers.v1.state import state_cls

        self.table, self.seat, self.task, self.num_turns = table, seat, task, 0
        agent = vf.AgentInfo(config=vf.AgentConfig(), name=seat.name, trainable=seat.trainable)
        self.trace = vf.Trace(task=_described(task), state=state_cls(type(task))(), agent=agent)

    async def turn(self, message: Any = None) -> Any:
        """Gives a message (text, messages, or None for the prompt of the task).  Returns a `vf.Segment`, terminated
        after the most turns.  Raises: ValueError for a message where the prompt comes first, or for none."""
        from verifiers import v1 as vf

        is_prompt = not self.num_turns and self.task.data.prompt is not None
        if is_prompt == (message is not None):
            raise ValueError("the first turn of a task with a prompt has no message; every other turn has one")
        if self.num_turns == self.table.max_turns or await self._is_stopped():
            self.trace.stop("max_turns" if self.num_turns == self.table.max_turns else "stopped")
            return vf.Segment(messages=[], terminated=True)
        given = _messages(self.task.data.prompt if is_prompt else message)
        system = self.task.data.system_prompt
        if not self.num_turns and system:
            given.insert(0, vf.SystemMessage(content=system))
        for each in given:
            self._add(each)
        self.num_turns += 1
        observation = Observation(
            False,
            tuple(Message(each.role, _text(each.content)) for each in given),
            context="replace" if self.num_turns == 1 else "append",  # of the row's own prompt
            player=self.seat.name if self.table.has_players else "",
            is_trained=self.seat.trainable,
        )
        answer = await self.table.ask(observation)
        reply = vf.AssistantMessage(content=answer.text)
        ids = list(answer.token_ids)
        self._add(reply, sampled=True, token_ids=ids, mask=[True] * len(ids))
        finish = "length" if answer.finish_reason == "length" else "stop"
        self.trace.calls.append(vf.ModelCall(node=len(self.trace.nodes) - 1, finish_reason=finish))
        return vf.Segment(messages=[reply])

    async def close(self) -> None:
        """Scores the conversation."""
        self.trace.stop("user_closed")
        self.trace.ok = True
        await self.task.score(self.trace)
        self.table.traces.append(self.trace)

    async def _is_stopped(self) -> bool:
        if not self.num_turns:
            return False
        given = {"task": self.task.data, "trace": self.trace}
        for hook in self.task.hooks("stop"):
            names = inspect.signature(hook).parameters
            if await hook(**{name: value for name, value in given.items() if name in names}):
                return True
        return False

    def _add(self, message: Any, **more: Any) -> None:
        from verifiers import v1 as vf

        parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
        self.trace.nodes.append(vf.MessageNode(parent=parent, message=message, **more))


def load(taskset: str, settings: Mapping[str, Any], env: str, num_tasks: int) -> Loaded:
    """The tasks of a taskset, once in a process.  Raises: ConfigError."""
    key = json.dumps([taskset, settings, env, num_tasks], sort_keys=True, default=str)
    if key not in _LOADED:
        try:
            from verifiers import v1 as vf
            from verifiers.v1.utils.generic import concrete_type
            from verifiers.v1.utils.loaders import resolve_env_config
        except ImportError as error:
            raise ConfigError("package verifiers", str(error), "version 0.4 or newer", f"run {INSTALL}") from error
        if ":" in taskset:
            made = load_target(taskset)
            config = concrete_type(made, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
            tasks, player = made(config(**settings)), None
        else:
            given = {"taskset": {"id": taskset, **settings}, **({"id": env} if env else {})}
            player = vf.load_environment(resolve_env_config(given))
            tasks = player.taskset
            player = None if isinstance(player, vf.SingleAgentEnv) else player
        _LOADED[key] = Loaded(list(islice(tasks, num_tasks)), player)
    if not _LOADED[key].tasks:
        raise ConfigError("environment.options.taskset", f"{taskset} has no tasks", change="change its settings")
    return _LOADED[key]


def choose(tasks: Sequence[Any], wanted: Any, seed: int) -> Any:
    """The task that a row names, or one that the seed chooses.  Raises: ConfigError."""
    if wanted is None:
        return tasks[seed % len(tasks)]
    if isinstance(wanted, int) and 0 <= wanted < len(tasks):
        return tasks[wanted]
    found = [task for task in tasks if wanted in (task.data.id, task.data.name)]
    if isinstance(wanted, int) or not found:
        raise ConfigError("the row's field task", wanted, f"0 to {len(tasks) - 1}, or the id or name of a task")
    return found[0]


def check_playable(task: Any) -> None:
    """Raises: ConfigError for a task that needs a runtime of verifiers."""
    from verifiers import v1 as vf

    kind = type(task)
    needs = [
        f"{name} with a runtime" for name in ("setup", "finalize") if getattr(kind, name) is not getattr(vf.Task, name)
    ]
    for hook in (*task.hooks("reward"), *task.hooks("metric")):
        parameter = inspect.signature(hook).parameters.get("runtime")
        needs += [f"a runtime for {hook.__name__}"] if parameter and parameter.default is parameter.empty else []
    needs += ["a container"] if kind.NEEDS_CONTAINER else []
    needs += ["tools"] if kind.toolsets(task.config) else []
    if needs:
        raise ConfigError(
            f"task {kind.__name__}",
            f"needs {', '.join(needs)}, which whet does not start",
            change="play it with verifiers",
        )


def _described(task: Any) -> Any:
    from verifiers import v1 as vf

    return vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


def _messages(given: Any) -> list[Any]:
    from verifiers import v1 as vf
    from verifiers.v1.dialects.chat import parse_message

    if isinstance(given, str):
        return [vf.UserMessage(content=given)]
    return [parse_message(each) if isinstance(each, dict) else each for each in given]


def _text(content: Any) -> str:
    """The text of a message.  Raises: ValueError for images."""
    parts = [content] if isinstance(content, str) else [getattr(part, "text", None) for part in content or ()]
    if None in parts:
        raise ValueError("the task has images in its messages, which this adapter does not pass on")
    return "\n".join(map(str, parts))
