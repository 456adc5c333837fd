# SPDX-License-Identifier: Apache-2.0
"""The forms in which environments are written, and tasks of sub-agents, in processes and in the caller's."""

import re
from pathlib import Path
from typing import Any

import pytest

from whet.environments.host import Deadlines, EnvironmentHost, open_host
from whet.environments.protocol import Answer, Observation, Result, Task
from whet.environments.running import _is_gymnasium
from whet.types import Failure, Message, Prompt

WORLDS = '''
import asyncio, random
from whet.environments.protocol import Observation
from whet.types import Message

class Walk:
    """In gymnasium's form."""
    def __init__(self, goal=2): self.goal = goal
    def reset(self, *, seed=None, options=None):
        self.at = random.Random(seed).randrange(2)
        return f"at {self.at}", {}
    def step(self, action):
        if action == "wrong": return "only three", 1.0, False
        self.at += 1 if action == "right" else -1
        done = self.at == self.goal
        return f"at {self.at}", float(done), done, self.at < -1, {"metrics": {"moves": 1.0}}
    def close(self): pass

def echo(text, *, times=1):
    """A function that is the step."""
    if text == "end": return None
    if text == "pay": return "more", 0.5
    if text == "bad": return 7
    return text * times

class Once:
    """Of the short form: it pays every step."""
    def __init__(self, prompt): pass
    def step(self, text): return Observation(done=True, reward=1.0)

class Optional:
    """The long form with defaults."""
    def reset(self, prompt=None, seed=0):
        return Observation(False, (Message("user", f"{prompt and prompt.uid} {seed}"),))
    def step(self, answer): return Observation(True)

class Manager:
    """Asks sub-agents, twice, two of them side by side."""
    async def reset(self, prompt, seed): return Observation(done=False)
    async def step(self, answer, context):
        first, second = await asyncio.gather(context.run("one", "worker"), context.run("two", "worker", ground_truth=2))
        third = await context.run(first.text + second.text, "worker")
        return Observation(True, reward=float(third.text == "AB"), fields={"paid": third.reward})

class Impatient:
    async def reset(self, prompt, seed, context):
        found = await context.run("early", "worker")
        return Observation(False, (Message("user", found.text),))
    async def step(self, answer, context):
        asyncio.ensure_future(context.run("never read", "worker"))
        return Observation(True)
'''
AFTER = "RuntimeError: step was called after the end of the episode"
PROMPT = Prompt("0:7", 7, (Message("user", "?"),), (1, 2), "s", None)


@pytest.fixture
def world(tmp_path: Path) -> Any:
    """Opens an environment of the file and begins an episode."""
    (tmp_path / "forms.py").write_text(WORLDS)
    hosts = []

    def begun(name: str, **options: Any) -> tuple[EnvironmentHost, Any]:
        host = open_host(f"{tmp_path / 'forms.py'}:{name}", options, deadlines=Deadlines(20.0, 20.0, 2.0))
        hosts.append(host)
        host.start("a", PROMPT, 1)
        return host, result(host)

    yield begun
    for host in hosts:
        host.shutdown()


def result(host: EnvironmentHost) -> Any:
    [(uid, outcome)] = host.poll(30.0)
    assert uid == "a"
    return outcome


def stepped(host: EnvironmentHost, text: str, *results: Result) -> Any:
    host.step("a", Answer(text, results=results))
    return result(host)


def test_gymnasium_form(world: Any) -> None:
    host, first = world("Walk", goal=1)  # Random(1).randrange(2) is 0
    assert first == Observation(False, (Message("user", "at 0"),))
    assert stepped(host, "left") == Observation(False, (Message("user", "at -1"),), fields={"moves": 1.0})
    assert stepped(host, "wrong").message.startswith(
        "TypeError: the environment returned tuple; expected (observation,"
    )
    stepped(host, "right")
    assert stepped(host, "right") == Observation(True, (Message("user", "at 1"),), 1.0, {"moves": 1.0})


def test_what_may_take_a_prompt_is_the_long_form() -> None:
    class Long:
        def reset(self, prompt=None, seed=0): ...  # type: ignore[no-untyped-def]

    class OtherName(Long):
        def reset(self, row=None, seed=0): ...  # type: ignore[no-untyped-def]

    class ByName(Long):
        def reset(self, prompt=None, *, seed=0): ...  # type: ignore[no-untyped-def]

    class Plain(Long):
        def reset(self, seed=None, options=None): ...  # type: ignore[no-untyped-def,override]

    class OptionsFirst(Long):
        def reset(self, options=None, seed=None): ...  # type: ignore[no-untyped-def,override]

    class Wraps(Long):
        def reset(self, *args, **kwargs): ...  # type: ignore[no-untyped-def]

    forms = {kind: _is_gymnasium(kind().reset) for kind in (Long, OtherName, ByName, Plain, OptionsFirst, Wraps)}
    assert [*forms.values()] == [False, False, False, True, True, True]


def test_a_prompt_with_a_default_gets_the_prompt(world: Any) -> None:
    _, first = world("Optional")
    assert first == Observation(False, (Message("user", "0:7 1"),))


def test_gymnasium_form_truncates(world: Any) -> None:
    host, _ = world("Walk")
    stepped(host, "left")
    last = stepped(host, "left")
    assert last.truncated and not last.done
    assert stepped(host, "left").message.startswith(AFTER)


def test_a_function_is_the_step(world: Any) -> None:
    host, first = world("echo", times=2)
    assert first == Observation(False)
    assert stepped(host, "ab") == Observation(False, (Message("user", "abab"),))
    assert stepped(host, "pay") == Observation(False, (Message("user", "more"),), 0.5)
    assert stepped(host, "bad").message.startswith("TypeError: the step function returned int; expected a reply")
    assert stepped(host, "end") == Observation(True)
    assert stepped(host, "pay").message.startswith(AFTER)


def test_the_short_form_ends_once(world: Any) -> None:
    host, first = world("Once")
    assert first == Observation(False) and stepped(host, "a") == Observation(True, reward=1.0)
    assert stepped(host, "a").message.startswith(AFTER)


def test_tasks_of_sub_agents(world: Any) -> None:
    host, _ = world("Manager")
    asked = stepped(host, "go")
    tasks = (Task("worker", (Message("user", "one"),)), Task("worker", (Message("user", "two"),), ground_truth=2))
    assert asked == Observation(False, tasks=tasks)
    again = stepped(host, "", Result("A", 0.0, 1), Result("B", 0.0, 1))
    assert again == Observation(False, tasks=(Task("worker", (Message("user", "AB"),)),))
    assert stepped(host, "", Result("AB", 0.25, 1)) == Observation(True, reward=1.0, fields={"paid": 0.25})


def test_a_task_at_the_reset_and_one_that_nobody_awaits(world: Any) -> None:
    host, first = world("Impatient")
    assert first.tasks == (Task("worker", (Message("user", "early"),)),)
    assert stepped(host, "", Result("hello", 0.0, 1)) == Observation(False, (Message("user", "hello"),))
    assert stepped(host, "go") == Observation(True)


FROZEN = {"env_id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"], "render": True}


def test_gymnasium_by_name() -> None:
    """The map is SFFF FHFH FFFH HFFG: down, down, right, right, down, right is a way to the goal."""
    pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install gymnasium")
    host = open_host("gymnasium", {**FROZEN, "kwargs": {"is_slippery": False}, "invalid_reward": -0.1})
    try:
        host.start("a", PROMPT, 3)
        first = result(host)
        assert "SFFF" in str(first.messages[0].content).replace("\x1b[41m", "").replace("\x1b[0m", "")
        refused = stepped(host, "hmm")
        assert (refused.reward, refused.messages[0].content) == (
            -0.1,
            "There is no such action. Answer with one of: left, down, right, up",
        )
        for word in ("down", "I go DOWN", "left or right"):
            assert not stepped(host, word).done
        stepped(host, "right")
        stepped(host, "down")
        last = stepped(host, "right")
        assert last.done and last.reward == 1.0 and last.fields == {"success": 1.0}
    finally:
        host.shutdown()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"env_id": "FrozenLake-v1", "actions": ["a", "b"]}, r"options\.actions: 2 .* 4 .*FrozenLake-v1"),
        ({"env_id": "FrozenLake-v1", "actions": ["a", "b", "c", "A"]}, r"options\.actions: 4 .* 4 .*FrozenLake-v1"),
        ({"env_id": "MountainCarContinuous-v0"}, r"options\.env_id: MountainCarContinuous-v0.*Box"),
        ({"env_id": "NoSuchLake-v1"}, r"options\.env_id: NoSuchLake"),
    ],
)
def test_gymnasium_refuses(options: Any, error: str) -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install gymnasium")
    host = open_host("gymnasium", options)
    try:
        host.start("a", PROMPT, 3)
        failed = result(host)
        assert isinstance(failed, Failure) and re.search(error, failed.message)
    finally:
        host.shutdown()
