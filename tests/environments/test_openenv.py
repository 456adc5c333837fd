# SPDX-License-Identifier: Apache-2.0
"""OpenEnv in both directions: its servers played by whet, and whet's environments served to its clients."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from whet_environments.openenv_client import (
    OpenEnv,
    RefusedError,
    converted,
    last_lines,
    read_action,
    read_reply,
    read_schemas,
    shown,
)

from tests.raising import raises
from whet.environments.host import Deadlines, EnvironmentHost, open_host
from whet.environments.protocol import Answer, Observation
from whet.environments.running import EnvironmentSpec, Outcome, Running, at_once
from whet.errors import ConfigError
from whet.plugins.agents.check import Plan, check
from whet.types import Failure, Message, Prompt

PROMPT = Prompt("0:7", 7, (Message("user", "?"),), (1, 2), "s", None)
CLIENT = "whet_environments.openenv_client:OpenEnv"
LAKE = "whet_environments.frozen_lake:FrozenLake"
SLIPPERY = {"slippery": True, "size": 3, "context": "append", "max_tokens": 8, "max_steps": 3}
needs_openenv = pytest.mark.skipif(
    importlib.util.find_spec("openenv") is None, reason="OpenEnv is not installed: pip install openenv-core"
)
WALK = {
    "properties": {
        "metadata": {"type": "object"},
        "direction": {"type": "string", "enum": ["left", "right"]},
        "cells": {"type": "integer", "default": 1},
    },
    "required": ["direction"],
}


@pytest.mark.parametrize(
    ("text", "template", "action"),
    [
        ("left", None, {"direction": "left"}),
        (" right\n", {"direction": "{text}", "cells": 2}, {"direction": "right", "cells": 2}),
        ("3", {"direction": "left", "cells": "{text}"}, {"direction": "left", "cells": 3}),
    ],
)
def test_read_action(text: str, template: Any, action: Any) -> None:
    assert read_action(text, WALK, template) == action


def test_read_action_from_json() -> None:
    schema = {**WALK, "required": ["direction", "cells"]}
    action = {"direction": "left", "cells": 1}
    for text in ('{"direction": "left", "cells": 1}', '```json\n{"direction": "left", "cells": 1}\n```\n'):
        assert read_action(text, schema, None) == action
    for text in ("left", "[1]", "", "[" * 100_000, '{"direction"'):
        with pytest.raises(RefusedError, match="direction, cells"):
            read_action(text, schema, None)


def test_an_object_with_the_fields_of_the_schema_is_the_action() -> None:
    """A tool call of OpenEnv's has one required field, and is not its text."""
    schema = {"properties": {"tool_name": {"type": "string"}, "arguments": {"type": "object"}}}
    schema["required"] = ["tool_name"]
    call = {"tool_name": "add", "arguments": {"a": 1}}
    assert read_action(json.dumps(call), schema, None) == call
    assert read_action(f"```json\n{json.dumps(call)}\n```", schema, None) == call
    for text in ('{"arguments": {}}', '{"tool_name": "add", "color": 3}', "[1]", "add"):
        assert read_action(text, schema, None) == {"tool_name": text}
    assert read_action('{"tool_name": "x"}', schema, {"tool_name": "{text}"}) == {"tool_name": '{"tool_name": "x"}'}


def test_what_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"direction .*'up'.*left, right"):
        read_action("up", WALK, None)
    with pytest.raises(RefusedError, match=r"cells .*'many'.*integer"):
        read_action("many", WALK, {"direction": "left", "cells": "{text}"})
    with raises(ConfigError, "environment.options.action", found="way", expected=re.compile("metadata, direction")):
        read_action("many", WALK, {"way": "{text}"})
    for both in ({}, {"url": "http://x", "command": "x"}):
        with raises(ConfigError, "environment.options", expected=re.compile("url .*command")):
            OpenEnv(**both)
    with raises(ConfigError, "environment.options.url", found="localhost:8000", expected="http://HOST:PORT"):
        OpenEnv(url="localhost:8000")


def test_converted() -> None:
    assert converted("True", {"type": "boolean"}, "x") is True
    assert converted("2.5", {"anyOf": [{"type": "number"}, {"type": "null"}]}, "x") == 2.5
    assert converted("[1, 2]", {"type": "array"}, "x") == [1, 2]
    assert converted(" a ", {}, "x") == converted(" a ", {"type": "string"}, "x") == " a "


def test_shown() -> None:
    seen = {"board": "xo", "lives": 2, "moves": [1]}
    assert shown(seen, None) == shown(seen, "board") == "xo"
    assert shown(seen, "{board}, {lives} lives, {moves}") == "xo, 2 lives, [1]"
    assert shown({"lives": 2}, None) == '{"lives": 2}'
    with raises(ConfigError, "environment.options.show", found="map", expected=re.compile("board, lives, moves")):
        shown(seen, "{map}")


def result(host: EnvironmentHost) -> Any:
    [(_, outcome)] = host.poll(60.0)
    return outcome


def played(options: dict[str, Any], texts: Sequence[str], *, name: str = CLIENT, seed: int = 3) -> list[Outcome]:
    """Plays an episode through a host, as a run does."""
    host = open_host(name, options, deadlines=Deadlines(60.0, 30.0, 5.0))
    try:
        host.start("a", PROMPT, seed)
        seen = [result(host)]
        for text in texts:
            host.step("a", Answer(text))
            seen.append(result(host))
        return seen
    finally:
        host.shutdown()


def test_an_absent_server_fails_the_episode() -> None:
    [failed] = played({"url": "http://127.0.0.1:9", "connect_seconds": 2.0}, ())
    assert isinstance(failed, Failure) and failed.source == "environment"
    assert re.match("ConnectionError: .*http://127.0.0.1:9/schema: ", failed.message)


@pytest.mark.slow
def test_a_command_that_fails_says_why() -> None:
    [failed] = played({"command": f"{sys.executable} -c 'raise SystemExit(\"no port {{port}}\")'"}, ())
    assert isinstance(failed, Failure)
    assert re.search(r"environment\.options\.command .*exit code 1;.*: no port \d", failed.message)
    fails = "print('starts' * 99); deep = lambda n: deep(n - 1) if n else int('the reason is here'); deep(50)"
    [failed] = played({"command": shlex.join([sys.executable, "-c", fails])}, ())
    assert isinstance(failed, Failure)
    assert "ValueError: invalid literal for int() with base 10: 'the reason is here'" in failed.message
    assert "startsstarts" not in failed.message


def test_last_lines() -> None:
    assert last_lines("a\n\n  b\n  ^^^^\nError: c\n", 11) == "b\nError: c"
    assert last_lines("a" * 30 + "\n" + "b" * 30, 20) == "b" * 20
    assert last_lines("") == ""


class Started:
    """A server process."""

    def __init__(self, *words: str, cwd: Path | None = None) -> None:
        self.process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True, cwd=cwd)

    def line(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def stop(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def lake() -> Iterator[str]:
    """The address of a server of whet's slippery lake."""
    options = [word for name, value in SLIPPERY.items() for word in ("--option", f"{name}={value}")]
    server = Started("-m", "whet_environments.openenv_server", LAKE, *options, "--port", "0", "--max-sessions", "3")
    line = server.line()
    assert line.startswith(f"{LAKE} is served at http://127.0.0.1:"), line
    yield line.rpartition(" ")[2].strip()
    server.stop()


@needs_openenv
@pytest.mark.slow
def test_a_port_that_is_taken_and_ctrl_c() -> None:
    command = [sys.executable, "-m", "whet_environments.openenv_server", LAKE, "--port"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = subprocess.run([*command, str(port)], capture_output=True, text=True, timeout=60)
    said = refused.stderr.splitlines()[-1]
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert re.search(rf"--port: {port} .*127\.0\.0\.1.*or 0$", said)
    with subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().split()[-1]
        assert httpx.get(f"{address}/health", trust_env=False, timeout=20).status_code == 200
        process.send_signal(signal.SIGINT)
        assert (process.wait(20), process.stderr.read()) == (0, "")


WORDS = ["<answer>Down</answer>", "hm", "<answer>Right</answer>", "<answer>Up</answer>", "<answer>Left</answer>"] * 2


def in_process(seed: int) -> list[Observation]:
    """The same episode without a server, up to its end."""
    running = Running(EnvironmentSpec(LAKE, SLIPPERY).load())
    seen = [at_once(running.call("reset", PROMPT, seed))]
    for word in WORDS:
        if not (seen[-1].done or seen[-1].truncated):
            seen.append(at_once(running.call("step", Answer(word))))
    return seen


@needs_openenv
@pytest.mark.slow
def test_a_served_environment_says_the_same_to_whet(lake: str) -> None:
    ends = set()
    for seed in range(6):
        expected = in_process(seed)
        assert played({"url": lake}, WORDS[: len(expected) - 1], seed=seed) == expected
        ends.add((expected[-1].done, expected[-1].truncated))
    assert len(ends) == 2


@needs_openenv
@pytest.mark.slow
def test_a_served_environment_says_the_same_to_openenv(lake: str) -> None:
    from openenv.core.generic_client import GenericEnvClient

    with GenericEnvClient(base_url=lake).sync() as one, GenericEnvClient(base_url=lake).sync() as two:
        for seed in range(3):
            expected, clients = in_process(seed), (one, two)
            for client in clients:
                begun = client.reset(seed=seed, episode_id=f"e{seed}")
                assert begun.observation["text"] == expected[0].messages[0].content and begun.reward is None
            for index, observation in enumerate(expected[1:]):
                for client in clients:  # side by side
                    seen = client.step({"text": WORDS[index]})
                    assert seen.observation["text"] == observation.messages[0].content
                    assert (seen.reward, seen.done) == (observation.reward, observation.done or observation.truncated)
                    assert seen.observation["fields"] == observation.fields
                    assert seen.observation["truncated"] == observation.truncated
            assert client.state() == {"episode_id": f"e{seed}", "step_count": len(expected) - 1}
            with pytest.raises(RuntimeError, match="the episode is over, or has not begun; reset begins one"):
                client.step({"text": "x"})
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            one.step({"words": "x"})


@needs_openenv
@pytest.mark.slow
def test_sessions_are_limited_and_freed(lake: str) -> None:
    async def begun(number: int) -> OpenEnv:
        client = OpenEnv(url=lake, start_seconds=1.0)
        await client.reset(PROMPT, number)
        return client

    async def crowd() -> None:
        clients = [await begun(number) for number in range(3)]
        with pytest.raises(RuntimeError, match=r"answered reset with CAPACITY_REACHED: .*; asked for 1 s: lower env"):
            await begun(3)
        await clients.pop().close()
        for _ in range(20):
            try:
                clients.append(await begun(4))
                break
            except RuntimeError:
                await asyncio.sleep(0.1)
        assert len(clients) == 3
        for client in clients:
            await client.close()
            await client.close()

    asyncio.run(crowd())


@needs_openenv
@pytest.mark.slow
def test_more_episodes_than_the_server_has_room_for_wait(lake: str) -> None:
    host = open_host(CLIENT, {"url": lake}, deadlines=Deadlines(60.0, 30.0, 5.0))
    try:
        for uid in "abcdef":
            host.start(uid, PROMPT, 3)
        begun = dict[str, Outcome]()
        while len(begun) < 6:
            for uid, outcome in host.poll(60.0):
                begun[uid] = outcome
                host.close(uid)
        assert list(begun.values()) == [in_process(3)[0]] * 6
    finally:
        host.shutdown()


def serving(name: str) -> dict[str, str]:
    return {"command": f"{sys.executable} -m tests.environments.openenv_servers {name} {{port}}"}


@needs_openenv
@pytest.mark.slow
def test_a_typed_environment() -> None:
    """Random(7).randint(1, 9) is 6."""
    options = {**serving("Walk"), "reset": {"far": 9}, "format_penalty": 0.5}
    first, refused, moved = played(options, ["up", "right"], seed=7)
    assert first.messages == (Message("user", '{"place": 0, "goal": 6}'),)
    assert first.fields == {"place": 0.0, "goal": 6.0}
    assert (refused.reward, refused.fields) == (-0.5, {"invalid": 1.0})
    text = "That is no action: direction is 'up'; expected one of left, right"
    assert refused.messages == (Message("user", text),)
    assert moved.fields == {"place": 1.0, "goal": 6.0}
    more = {"action": {"direction": "right", "cells": "{text}"}, "show": "At {place} of {goal}."}
    _, wrong, walked, late = played({**options, **more}, ["[]", "6", "1"], seed=7)
    assert wrong.messages[0].content.startswith("That is no action: cells: Input should be")
    assert walked == Observation(
        True, (Message("user", "At 6 of 6."),), 1.0, {"place": 6.0, "goal": 6.0}, state_key="At 6 of 6."
    )
    assert isinstance(late, Failure) and "step was called after the end" in late.message


@needs_openenv
@pytest.mark.slow
def test_deadlines_errors_and_lost_servers() -> None:
    options = {**serving("Code"), "message_seconds": 2.0}
    host = open_host(CLIENT, options, deadlines=Deadlines(60.0, 30.0, 5.0))
    try:
        for text, said in (
            ("1+2", None),
            ("raise", r"RuntimeError: .*\bstep\b.* EXECUTION_ERROR: no such program"),
            ("leave", r"ConnectionError: .*\bstep\b"),
            ("2+2", None),  # the server is started again
            ("sleep", r"TimeoutError: .*\bstep\b.*\b2 s\b"),
        ):
            host.start("a", PROMPT, 0)
            assert result(host).messages == (Message("user", "ready"),)
            host.step("a", Answer(text))
            seen = result(host)
            if said is None:
                assert (seen.reward, seen.fields) == (1.0, {"exit_code": 0.0})
                assert seen.messages == (Message("user", str(eval(text))),)
            else:
                assert re.search(said, seen.message) and "http://127.0.0.1:" in seen.message
            host.close("a")
            time.sleep(0.3)  # the server takes one session, and frees it after the connection has ended
    finally:
        host.shutdown()


@needs_openenv
@pytest.mark.slow
def test_the_environment_that_openenv_makes(tmp_path: Path) -> None:
    """`openenv init` writes an echo environment: 0.1 for each character."""
    made = subprocess.run(
        [sys.executable, "-m", "openenv.cli", "init", "echo_probe"], cwd=tmp_path, capture_output=True, timeout=100
    )
    assert made.returncode == 0, made.stderr
    app = f"--app-dir {tmp_path} echo_probe.server.app:app"
    first, second, third = played(
        {"command": f"{sys.executable} -m uvicorn {app} --host 127.0.0.1 --port {{port}}"}, ["hello", "a b"]
    )
    assert first.messages == (Message("user", "Echo Probe environment ready!"),)
    assert second.messages == (Message("user", "hello"),)
    assert second.reward == pytest.approx(0.5) and third.reward == pytest.approx(0.3)
    assert third.fields == {"message_length": 3.0}


@needs_openenv
@pytest.mark.slow
def test_the_database_of_agentsynth() -> None:
    """AgentSynth's environment with an SQL tool, through its own bridge to OpenEnv: -0.02 for an error of the database,
    -0.05 for an unknown tool, and its verification and judge at the end."""
    pytest.importorskip("agentsynth", reason="AgentSynth is not installed: pip install agentsynth-ai")
    query = "SELECT region, SUM(revenue) AS total FROM sales WHERE quarter = 'Q4' GROUP BY region ORDER BY total DESC"
    calls = [("sql_query", {"query": query}), ("sql_query", {"query": "SELEC"}), ("ask", {})]
    texts = [json.dumps({"tool_name": name, "arguments": given}) for name, given in calls]
    answer = json.dumps({"tool_name": "final_answer", "arguments": {"answer": "AMER sold the most: 30350."}})
    task = "Which region sold the most in Q4?"
    options = {**serving("Database"), "show": "result", "reset": {"task": task}}
    first, table, error, unknown, last = played(options, [*texts, answer])
    assert first.messages == (Message("user", json.dumps({"task": task, "tools": ["sql_query", "final_answer"]})),)
    assert table.messages[0].content.splitlines()[:2] == ["region | total", "AMER | 30350"] and table.reward == 0.0
    assert error.messages[0].content.startswith("SQLError: ") and error.reward == pytest.approx(-0.02)
    assert unknown.messages[0].content.startswith("InvalidAction: unknown tool 'ask'")
    assert unknown.reward == pytest.approx(-0.05)
    assert last.done and last.messages[0].content == "Episode finished: AMER sold the most: 30350."
    _, guessed = played(options, [answer])
    assert guessed.done and 0.0 < guessed.reward < last.reward < 1.0  # no credit for an answer without a query


@needs_openenv
@pytest.mark.slow
def test_the_safety_gym_of_dipg(tmp_path: Path) -> None:
    """The server of `openenv-dipg-safety` with a row of ours, whose context has no answer: 30 for saying that (10 each
    for the format, for not answering and for being right in it), -20 for a proof that is not in the context."""
    pytest.importorskip("med_safety_gym", reason="not installed: pip install --no-deps openenv-dipg-safety")
    row = {
        "messages": [
            {
                "role": "user",
                "content": "<context>Trial A: 12 patients.</context><question>Who survived longest?</question>",
            },
            {"role": "assistant", "content": "The context does not contain this information."},
        ]
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    app = "med_safety_gym.app:app --host 127.0.0.1 --port {port}"
    command = f"env DIPG_DATASET_PATH={tmp_path}/rows.jsonl {sys.executable} -m uvicorn {app}"
    options = {"command": command, "show": "{context} {question}"}
    form = "<think>I read it.</think><proof>{}</proof><answer>{}</answer>"
    for proof, text, reward in (
        ("", "The context does not contain this information.", 30.0),
        ("Patient 7 lived for 9 years.", "Patient 7", -20.0),
    ):
        first, last = played(options, [form.format(proof, text)])
        assert first.messages == (Message("user", "Trial A: 12 patients. Who survived longest?"),)
        assert last.done and last.reward == reward


@needs_openenv
@pytest.mark.slow
def test_a_served_environment_passes_the_check(lake: str) -> None:
    found = check(CLIENT, {"url": lake}, Plan(PROMPT, seconds=30.0))
    assert not [finding for finding in found if finding.is_ok is False]


SEEN = '{"type": "observation", "data": {"observation": {"x": %s}, "reward": %s, "done": false}}'


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        '"text"',
        '{"type": "error"}',
        '{"type": "error", "data": [1]}',
        '{"type": "observation", "data": {"observation": [1]}}',
        '{"type": "observation", "data": {"observation": null, "reward": 1}}',
        SEEN % ("1", "1e400"),
        SEEN % ("1", "NaN"),
        SEEN % ("1", '"many"'),
        SEEN % ("1", "[1]"),
        SEEN % ("-1e400", "1"),
        SEEN % ("Infinity", "1"),
        SEEN % ("9" * 5000, "1"),
        SEEN % ("[" * 70 + "]" * 70, "1"),
        SEEN % ("[" * 100_000 + "]" * 100_000, "1"),
        " " * (17 * 2**20),
    ],
    ids=range(18),
)
def test_a_reply_that_lies_is_an_error_that_names_the_server(text: str) -> None:
    for each in (text, text.encode() + b"\xff"[: text.startswith("{")]):
        with pytest.raises(RuntimeError) as failed:
            read_reply(each, "step", "http://lab:7")
        assert "http://lab:7" in str(failed.value) and len(str(failed.value)) < 500


def test_a_reply_that_is_one() -> None:
    assert read_reply(SEEN % ("[[1.5]]", "2"), "step", "u")["observation"] == {"x": [[1.5]]}
    with pytest.raises(RefusedError):
        errors = [{"loc": 5, "msg": ["x"]}, 3, {"loc": ["a", 1]}]
        refused = {"type": "error", "data": {"code": "VALIDATION_ERROR", "errors": errors}}
        read_reply(json.dumps(refused), "step", "u")


@pytest.mark.parametrize(
    "schema",
    [
        b"[]",
        b"{",
        b'{"action": 5, "observation": {}}',
        b'{"action": {"properties": [1]}, "observation": {}}',
        b'{"action": {"properties": {"a": 1}}, "observation": {}}',
        b'{"action": {"properties": {"a": {"type": ["x"]}}}, "observation": {}}',
        b'{"action": {"properties": {"a": {"anyOf": [1]}}}, "observation": {}}',
        b'{"action": {"required": [{}]}, "observation": {}}',
        b'{"action": {"required": 1e400}, "observation": {}}',
        b"[" * 100_000,
        b" " * (17 * 2**20),
    ],
    ids=range(11),
)
def test_schemas_that_are_none(schema: bytes) -> None:
    class Schemas(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(schema)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Schemas) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ConnectionError) as failed:
            asyncio.run(read_schemas(url, 10.0))
        assert url in str(failed.value)
