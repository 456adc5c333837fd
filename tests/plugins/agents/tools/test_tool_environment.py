# SPDX-License-Identifier: Apache-2.0
"""Tools around an environment: calls that work, fail, hang and lie; the processes and the template are real."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from episodes import episode
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.raising import raises
from whet.config import TrainConfig
from whet.config.checks import problems
from whet.config.schema import EnvironmentConfig
from whet.environments.host import Deadlines, EnvironmentHost, open_host
from whet.environments.protocol import Answer, Observation
from whet.environments.toolbox import tools_of
from whet.errors import ConfigError
from whet.plugins.agents.tools.sources import _run
from whet.plugins.agents.tools.toolbox import toolbox_of
from whet.rollout.batch import rows_of
from whet.types import Failure, Message, Prompt

TOOLS = '''
import asyncio, os, time
from whet.errors import SandboxError

def add(a: int, b: int = 10, *, sign: int = 1) -> int:
    """Adds two integers.

    Args:
        a: the first
    """
    return sign * (a + b)

def times_out() -> str:
    """Has a deadline of its own."""
    raise TimeoutError("the server did not answer within 2 s")

async def slow(seconds: float) -> str:
    """Waits without a thread."""
    await asyncio.sleep(seconds)
    return "slept"

def hang(seconds: float = 1000.0) -> str:
    """Waits in a thread."""
    time.sleep(seconds)
    return "awake"

def do(what: str) -> str:
    """Does bad things."""
    if what == "raise": raise KeyError("gone")
    if what == "exit": raise SystemExit(3)
    if what == "die": os._exit(4)
    if what == "sandbox": raise SandboxError("no bubblewrap here")
    if what == "half": return "\\ud83d"
    return what * 100

class Counter:
    """Counts within an episode."""
    def __init__(self, prompt, *, start: int = 0, log: str = ""):
        self.at, self.log, self.name = start, log, prompt.uid
    def more(self, by: int) -> int:
        """Adds to the count."""
        self.at += by
        return self.at
    async def show(self) -> dict[str, int]:
        """Shows the count."""
        return {self.name: self.at}
    def close(self):
        with open(self.log, "a") as file: file.write(f"{self.name}={self.at} ")

class Unmade:
    def __init__(self): raise OSError("no such place")
    def use(self) -> str:
        """Does nothing."""

def parser(text, schemas):
    yield {}["name"] if "bad" in text else text

def no_type(a): 
    """Adds."""

class Refuses:
    """Rewards the number of tool results that the model has read, and asks once more after "again"."""
    def __init__(self, prompt): pass
    def step(self, answer):
        from whet.environments.protocol import Observation
        from whet.types import Message
        if answer == "sandbox":
            raise SandboxError("no bubblewrap here")
        if answer == "again":
            return Observation(False, (Message("user", "And?"),), reward=0.5, fields={"asked": 1.0})
        return Observation(True, reward=len(answer))

class Duel:
    """White, black and white say a number; black is not trained."""
    def __init__(self, prompt): pass
    def reset(self, prompt, seed):
        self.number = 0
        return self.ask()
    def ask(self):
        from whet.environments.protocol import Observation
        from whet.types import Message
        player, told = ("white", "black")[self.number % 2], (Message("user", f"Number {self.number}?"),)
        where = {"player": player, "state_key": str(self.number), "context": ("append", "replace")[self.number % 2]}
        return Observation(False, told, 0.5 * self.number, {"asked": 1.0}, is_trained=player == "white", **where)
    def step(self, answer):
        self.number += 1
        from whet.environments.protocol import Observation
        return Observation(True, rewards={"white": 1.0, "black": -1.0}) if self.number == 3 else self.ask()
'''  # noqa: W291
PROMPT = Prompt("0:7", 7, (Message("user", "?"),), (1, 2), "s", None)


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(TOOLS)
    return str(tmp_path / "mine.py")


@pytest.fixture
def opened(file: str) -> Any:
    hosts: list[EnvironmentHost] = []

    def open_it(*tools: Any, environment: str = "single_turn", **settings: Any) -> EnvironmentHost:
        made = [at(file, each) for each in tools]
        config = EnvironmentConfig(tools=made, **settings)
        deadlines = Deadlines(reset=20.0, step=20.0, close=5.0)
        hosts.append(open_host(environment, tools=tools_of(config), deadlines=deadlines))
        return hosts[-1]

    yield open_it
    for host in hosts:
        host.shutdown()


def at(file: str, tool: Any) -> Any:
    """An entry with names in `file`."""
    if isinstance(tool, str):
        return f"{file}:{tool}"
    return {**tool, "python": f"{file}:{tool['python']}"} if "python" in tool else tool


def result(host: EnvironmentHost, uid: str, seconds: float = 20.0) -> Observation | Failure:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := dict(host.poll(0.5)):
            return found[uid]
    raise TimeoutError


def called(host: EnvironmentHost, *calls: tuple[str, Mapping[str, Any]], uid: str = "a") -> Observation | Failure:
    """The observation after a turn with calls; the first call begins the episode."""
    if uid not in host._open:  # type: ignore[attr-defined]
        host.start(uid, PROMPT, 0)
        begun = result(host, uid)
        if isinstance(begun, Failure):
            return begun
        assert {name: value for name, value in begun.fields.items() if value} == {}
    made = [{"id": f"c{place}", "name": name, "arguments": given} for place, (name, given) in enumerate(calls)]
    host.step(uid, Answer("text", tuple(made)))
    return result(host, uid)


def texts(observation: Observation | Failure) -> list[Any]:
    assert isinstance(observation, Observation), observation
    return [message.content for message in observation.messages]


def counts(observation: Observation | Failure) -> dict[str, float]:
    assert isinstance(observation, Observation), observation
    return {name.removeprefix("tools/"): value for name, value in observation.fields.items() if value}


@pytest.mark.slow
def test_results_come_in_the_order_of_the_calls(opened: Any) -> None:
    host = opened("add", "slow")
    found = called(host, ("slow", {"seconds": 0.3}), ("add", {"a": 1, "b": 2}), ("add", {"a": "5"}))
    assert isinstance(found, Observation) and not found.done
    assert found.messages == (
        Message("tool", "slept", {"tool_call_id": "c0", "name": "slow"}),
        Message("tool", "3", {"tool_call_id": "c1", "name": "add"}),
        Message("tool", "15", {"tool_call_id": "c2", "name": "add"}),
    )
    assert counts(found) == {"calls": 3.0}


@pytest.mark.slow
def test_options_are_of_the_config_and_not_of_the_model(opened: Any, file: str) -> None:
    host = opened({"python": "add", "options": {"sign": -1}})
    assert texts(called(host, ("add", {"a": 1}), ("add", {"a": 1, "sign": 1}))) == [
        "-11",
        "error: wrong arguments: sign: Extra inputs are not permitted",
    ]
    with raises(ConfigError, "environment.tools[0].options.sigh", found=1, change=re.compile("'sign'")):
        toolbox_of(EnvironmentConfig(tools=[{"python": f"{file}:add", "options": {"sigh": 1}}]))


@pytest.mark.slow
def test_calls_of_a_turn_run_side_by_side_each_with_its_deadline(opened: Any) -> None:
    host = opened("slow", "hang", tool_limits={"seconds": 1.0})
    before = time.monotonic()
    found = called(
        host, ("slow", {"seconds": 0.8}), ("hang", {"seconds": 0.8}), ("hang", {}), ("slow", {"seconds": 60})
    )
    assert time.monotonic() - before < 8.0
    assert texts(found) == ["slept", "awake", *["error: the call took longer than 1 s"] * 2]
    assert counts(found) == {"calls": 4.0, "errors": 2.0, "late": 2.0}
    assert texts(called(host, ("slow", {"seconds": 0.0}))) == ["slept"]  # a thread that hangs holds nothing up


@pytest.mark.slow
def test_a_deadline_of_the_tool_itself_is_not_that_of_the_call(opened: Any) -> None:
    found = called(
        opened("times_out", "slow", tool_limits={"seconds": 5.0}), ("times_out", {}), ("slow", {"seconds": 0})
    )
    assert texts(found) == ["error: TimeoutError: the server did not answer within 2 s", "slept"]
    assert counts(found) == {"calls": 2.0, "errors": 1.0}


@pytest.mark.parametrize("raises", [False, True])
def test_a_result_after_the_deadline_is_ignored(raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of a late function ends without an error of its own, whatever comes out of the function."""
    uncaught, done = list[Any](), threading.Event()
    monkeypatch.setattr(threading, "excepthook", uncaught.append)

    def late() -> int:
        done.wait(20.0)
        return 1 // (not raises)

    async def call() -> None:
        before = threading.active_count()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await _run(late, is_async=False)
        done.set()
        until = time.monotonic() + 20.0
        while threading.active_count() > before and time.monotonic() < until:
            await asyncio.sleep(0.01)
        assert threading.active_count() == before

    asyncio.run(call())
    assert uncaught == []


@pytest.mark.slow
def test_what_a_tool_may_do_is_answered(opened: Any) -> None:
    host = opened("do", "add", tool_limits={"characters": 120})
    found = called(
        host,
        ("do", {"what": "raise"}),
        ("do", {"what": "exit"}),
        ("do", {"what": "half"}),
        ("do", {"what": "long"}),
        ("ad", {"a": 1}),
        ("add", {}),
    )
    shown = texts(found)
    assert shown[0] == "error: KeyError: 'gone'"
    assert shown[1].startswith("error: RuntimeError: SystemExit: 3 (")
    assert shown[2] == "?"
    assert shown[3] == "long" * 30 + "\n[cut: the result has 400 characters, of which the first 120 are shown]"
    assert shown[4:] == [
        "error: there is no tool 'ad'; the tools are do, add",
        "error: wrong arguments: a: Field required",
    ]
    assert counts(found) == {"calls": 6.0, "errors": 4.0, "cut": 1.0}
    lost = called(host, ("do", {"what": "die"}))
    assert lost == Failure("environment", "the environment's process died: exit code 4")


@pytest.mark.slow
def test_calls_beyond_the_limit_and_malformed_ones_are_answered(opened: Any) -> None:
    host = opened("add", tool_limits={"calls": 2})
    host.start("a", PROMPT, 0)
    assert isinstance(result(host, "a"), Observation)
    host.step("a", Answer("t", ({"id": "x", "name": "", "arguments": {}, "error": "the call is not valid JSON"},)))
    found = result(host, "a")
    assert texts(found) == ["error: the call is not valid JSON"]
    assert counts(found) == {"calls": 1.0, "errors": 1.0, "malformed": 1.0}
    assert texts(called(host, ("add", {"a": 1}), ("add", {"a": 2}))) == [
        "11",
        "error: no more calls: the limit is 2; answer now",
    ]


@pytest.mark.slow
def test_a_class_has_an_object_for_each_episode(opened: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    host = opened({"python": "Counter", "options": {"start": 5, "log": str(log)}})
    assert texts(called(host, ("more", {"by": 1}), uid="a")) == ["6"]
    assert texts(called(host, ("more", {"by": 3}), uid="b")) == ["8"]
    assert texts(called(host, ("more", {"by": 1}), uid="a")) == ["7"]
    assert texts(called(host, ("show", {}), uid="b")) == ['{"0:7": 8}']
    host.close("a")
    host.close("b")
    host.shutdown()
    assert sorted(log.read_text().split()) == ["0:7=7", "0:7=8"]


@pytest.mark.slow
def test_a_session_that_cannot_be_made_fails_its_episode(opened: Any) -> None:
    found = called(opened("Unmade"), ("use", {}))
    assert isinstance(found, Failure) and found.source == "tool"
    assert "use: OSError: no such place (" in found.message


@pytest.mark.slow
def test_a_turn_without_calls_goes_to_the_environment(opened: Any, file: str) -> None:
    host = opened("add", environment=f"{file}:Refuses")
    assert texts(called(host, ("add", {"a": 1}))) == ["11"]
    host.step("a", Answer("again"))
    found = result(host, "a")
    assert isinstance(found, Observation) and found.reward == 0.5 and found.messages == (Message("user", "And?"),)
    assert counts(found) == {"calls": 1.0, "asked": 1.0}
    host.step("a", Answer("four"))
    ended = result(host, "a")
    assert isinstance(ended, Observation) and ended.done and ended.reward == 4.0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["tool", "environment", "environment with tools"])
def test_a_sandbox_that_is_lost_fails_the_episode_and_is_no_result(opened: Any, file: str, where: str) -> None:
    host = opened(*([] if where == "environment" else ["add", "do"]), environment=f"{file}:Refuses")
    if where == "tool":
        found = called(host, ("do", {"what": "sandbox"}))
    else:
        host.start("a", PROMPT, 0)
        assert isinstance(result(host, "a"), Observation)
        host.step("a", Answer("sandbox"))
        found = result(host, "a")
    assert found == Failure("sandbox", "no bubblewrap here")


# What the model reads, through the chat template.

TURNS = [
    'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add"\n</tool_call>',
    "It is 3.",
]  # fmt: skip


@pytest.fixture
def tokenizer(qwen25_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(qwen25_folder)


@pytest.mark.slow
def test_the_result_of_a_call_belongs_to_the_player_that_called(tokenizer: PreTrainedTokenizerBase, file: str) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    config = EnvironmentConfig(name=f"{file}:Duel", tools=[f"{file}:add"])
    trajectory = episode(tokenizer, config, ["one", call, "three", "four"])
    who = [(turn.player, turn.is_trained, turn.state_key, turn.reward) for turn in trajectory.turns]
    assert who == [
        ("white", True, "0", 0.5),
        ("black", False, "1", 0.0),
        ("black", False, "1", 1.0 - 1.0),
        ("white", True, "2", 1.0),
    ]
    black, result = (str(tokenizer.decode(list(trajectory.turns[at].context_ids))) for at in (1, 2))
    between = "<|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert result == black + call + between
    assert trajectory.fields["asked"] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("text", ["I call it: {call}", "```json\n{call}\n```", "<think>\nHm.\n</think>\n\n{call}"])
def test_json_of_a_call_without_its_tags_ends_no_episode(
    tokenizer: PreTrainedTokenizerBase, file: str, text: str
) -> None:
    """It is answered with an error, and the model has another turn; no tool runs."""
    text = text.replace("{call}", '{"name": "add", "arguments": {"a": 1, "b": 2}}')
    trajectory = episode(tokenizer, EnvironmentConfig(tools=[f"{file}:add"]), [text, 'It is {"name": "Ada"}.'])
    [row] = rows_of(trajectory)
    assert [trajectory.fields[f"tools/{name}"] for name in ("calls", "errors", "malformed")] == [1.0, 1.0, 1.0]
    parts = [
        f"{text}<|im_end|>",
        "\n<|im_start|>user\n<tool_response>\nerror: the call is not in the format of calls; expected <tool_call>"
        '{"name": ..., "arguments": {...}}</tool_call>\n</tool_response><|im_end|>\n<|im_start|>assistant\n',
        'It is {"name": "Ada"}.<|im_end|>',
    ]
    assert tokenizer.decode(row.response_ids) == "".join(parts)
    assert [turn >= 0 for turn in row.turn_ids] == [
        1 - number % 2 for number, part in enumerate(parts) for _ in tokenizer.encode(part, add_special_tokens=False)
    ]


@pytest.mark.slow
def test_a_parser_that_raises_fails_its_episode_alone(tokenizer: PreTrainedTokenizerBase, file: str) -> None:
    parser = f"{file}:parser"
    config = EnvironmentConfig(tools=[f"{file}:add"], tool_parser=parser)
    trajectory = episode(tokenizer, config, ["bad"], fails=True)
    assert trajectory.failure.source == "tool"
    said = f"environment.tool_parser: {parser} raised KeyError: 'name' ({file}:"
    assert trajectory.failure.message.startswith(said)
    assert "Calls" in trajectory.failure.message.rpartition("; expected ")[2]
    assert [tokenizer.decode(list(turn.token_ids)) for turn in trajectory.turns] == ["bad<|im_end|>"]
    assert len(episode(tokenizer, config, ["good"]).turns) == 1


@pytest.mark.slow
def test_the_model_reads_its_tools_and_their_results(tokenizer: PreTrainedTokenizerBase, file: str) -> None:
    trajectory = episode(tokenizer, EnvironmentConfig(tools=[f"{file}:add"]), TURNS)
    [row] = rows_of(trajectory)
    schema = {"type": "function", "function": {"name": "add", "description": "Adds two integers."}}
    opening = str(tokenizer.decode(list(row.prompt_ids)))
    assert '"name": "add"' in opening and opening.endswith("<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n")
    assert schema["function"]["description"] in opening  # type: ignore[index]
    between = (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nerror: the call is not valid JSON; "
        'expected one object {"name": ..., "arguments": {...}} for each call\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    )
    encoded = [
        tokenizer.encode(part, add_special_tokens=False)
        for part in (TURNS[0] + "<|im_end|>", between, TURNS[1] + "<|im_end|>")
    ]
    assert row.response_ids == [token for part in encoded for token in part]
    assert [turn >= 0 for turn in row.turn_ids] == [1] * len(encoded[0]) + [0] * len(encoded[1]) + [1] * len(encoded[2])
    assert trajectory.fields == {
        "tools/calls": 2.0, "tools/errors": 1.0, "tools/malformed": 1.0, "tools/late": 0.0, "tools/cut": 0.0
    }  # fmt: skip
    [call, bad] = trajectory.messages[0].fields["tool_calls"]
    assert call == {"id": "t0000c000", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    assert (bad["id"], bad["function"]["name"]) == ("t0000c001", "unknown")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tools": ["calculater"]}, r"environment\.tools\[0\]: calculater; .*'calculator'"),
        ({"tools": ["nowhere.py:f"]}, r"environment\.tools\[0\]: nowhere\.py .*; correct the path"),
        ({"tools": [{"pyton": "f"}]}, r"environment\.tools\[0\]=\{'pyton': 'f'\}; .*\{python: path"),
        ({"tools": ["calculator"], "tool_parser": "herms"}, r"environment\.tool_parser: herms; .*'hermes'"),
        ({"tools": ["calculator"], "tool_limits": {"second": 1}}, r"environment\.tool_limits: second; .* seconds, s"),
        ({"tools": ["calculator"], "tool_limits": {"seconds": 60}}, r"tool_limits\.seconds=60\.0; .*step_seconds=60,"),
        ({"tool_parser": "hermes"}, r"environment\.tool_parser: hermes; .*environment\.tools "),
    ],
)  # fmt: skip
def test_the_config_is_checked_without_running_tools(settings: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    values = {
        "model": {"path": str(tmp_path)},
        "data": {"train_files": [str(tmp_path / "rows.jsonl")]},
        "reward": {"function": "gsm8k"},
        "environment": settings,
    }
    found = problems(TrainConfig.model_validate(values))
    with pytest.raises(AssertionError, match=said):
        assert not found, "\n".join(map(str, found))


def test_tools_without_a_schema_and_two_of_one_name(file: str) -> None:
    with raises(ConfigError, "environment.tools[0]: tool no_type: a", expected=re.compile("a: str")):
        toolbox_of(EnvironmentConfig(tools=[f"{file}:no_type"]))
    with raises(ConfigError, "environment.tools[1]", found=re.compile(r"\badd\b.*environment\.tools\[0\]")):
        toolbox_of(EnvironmentConfig(tools=[f"{file}:add", f"{file}:add"]))
    with raises(ConfigError, f"environment.tools[0]: tool {file}:nothing", found=re.compile(r"\bnothing\b")):
        toolbox_of(EnvironmentConfig(tools=[f"{file}:nothing"]))
    tools = toolbox_of(EnvironmentConfig(tools=[f"{file}:add"]))
    with raises(ConfigError, "chat template", change=re.compile(r"environment\.tool_role=user.*chat_template$")):
        tools.with_parser("{{ messages }}")
    with raises(ConfigError, "environment.tool_parser", found=None, expected=re.compile("gpt-oss, hermes")):
        tools.with_parser("{{ tools }}")
