# SPDX-License-Identifier: Apache-2.0
"""MCP servers of each kind, and servers that do not start, hang and die."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoTokenizer

from tests.raising import check_fields, raises
from whet.config.schema import EnvironmentConfig
from whet.data.media import images
from whet.environments.host import Deadlines, EnvironmentHost, open_host
from whet.environments.protocol import Answer, Observation
from whet.errors import ConfigError, ToolError
from whet.plugins.agents.tools.toolbox import toolbox_of
from whet.rollout.codec import TemplateCodec
from whet.types import Failure, Message, Prompt

pytest.importorskip("mcp", reason="MCP is not installed: pip install -e '.[mcp]'")
SERVER = Path(__file__).parent / "servers.py"
STDIO = {"mcp": {"command": [sys.executable, str(SERVER)]}}
PROMPT = Prompt("0:7", 7, (Message("user", "?"),), (1, 2), "s", None)
Opened = Callable[..., EnvironmentHost]


@pytest.fixture
def opened() -> Iterator[Opened]:
    hosts: list[EnvironmentHost] = []

    def open_it(tool: Any, **limits: float) -> EnvironmentHost:
        config = EnvironmentConfig(tools=[tool], tool_limits=limits)
        deadlines = Deadlines(reset=30.0, step=20.0, close=5.0)
        hosts.append(open_host("single_turn", tools=toolbox_of(config), deadlines=deadlines))
        return hosts[-1]

    yield open_it
    for host in hosts:
        host.shutdown()


def result(host: EnvironmentHost, uid: str) -> Observation | Failure:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if found := dict(host.poll(0.5)):
            return found[uid]
    raise TimeoutError


SLOW_START = ["-c", "echo start >> {log}; sleep 1; exec {python} {server}"]


@pytest.mark.slow
def test_sessions_with_processes_start_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once would share the processor, and pass the deadline of their start together."""
    monkeypatch.setattr("whet.environments.host.MAX_STARTS", 2)
    log = tmp_path / "log"
    words = [each.format(log=log, python=sys.executable, server=SERVER) for each in SLOW_START]
    config = EnvironmentConfig(tools=[{"mcp": {"command": ["sh", *words]}}])
    host = open_host("single_turn", tools=toolbox_of(config), deadlines=Deadlines(reset=60.0))
    log.write_text("")
    try:
        for uid in "abcdef":
            host.start(uid, PROMPT, 0)
        begun = dict[str, Observation | Failure]()
        until = time.monotonic() + 120.0
        while len(begun) < 6 and time.monotonic() < until:
            begun |= host.poll(0.2)
            assert len(log.read_text().split()) <= len(begun) + 2
        assert list(begun.values()) == [next(iter(begun.values()))] * 6 and isinstance(begun["a"], Observation)
    finally:
        host.shutdown()


def started(host: EnvironmentHost, uid: str) -> None:
    host.start(uid, PROMPT, 0)
    found = result(host, uid)
    assert isinstance(found, Observation), found


def called(host: EnvironmentHost, uid: str, name: str, **arguments: Any) -> Any:
    """The text of the result, or the failure."""
    host.step(uid, Answer("", ({"id": "c", "name": name, "arguments": arguments},)))
    found = result(host, uid)
    return found if isinstance(found, Failure) else found.messages[0].content


@pytest.fixture
def over_http(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """A server; with a parameter, one that wants this value of the header Authorization."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "WANTED": getattr(request, "param", "")}
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)], stderr=subprocess.DEVNULL, env=environment)
    for _ in range(200):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield {"mcp": {"url": f"http://127.0.0.1:{port}/mcp"}}
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_server_in_a_process_has_a_session_for_each_episode(opened: Opened) -> None:
    host = opened(STDIO)
    schemas = toolbox_of(EnvironmentConfig(tools=[STDIO])).schemas
    assert [schema.name for schema in schemas] == ["add", "note", "bad", "picture"]
    assert schemas[0].description == "Adds two integers."
    assert schemas[0].parameters["required"] == ["a", "b"]
    started(host, "a")
    started(host, "b")
    assert called(host, "a", "add", a=2, b=3) == "5"
    assert [called(host, "a", "note", value=1), called(host, "a", "note", value=2)] == ["1", "1 2"]
    assert called(host, "b", "note", value=9) == "9"
    assert called(host, "a", "bad", what="no").startswith("error: ")
    assert called(host, "a", "add", a="x", b=3).startswith("error: ")


@pytest.mark.slow
def test_a_server_that_dies_fails_its_episode_alone(opened: Opened) -> None:
    host = opened(STDIO)
    started(host, "a")
    started(host, "b")
    lost = called(host, "a", "bad", what="die")
    assert isinstance(lost, Failure) and lost.source == "tool", lost
    assert lost.message.startswith("environment.tools[0]: ") and f"['{sys.executable}'" in lost.message, lost
    assert called(host, "b", "add", a=2, b=3) == "5"
    host.close("a")


@pytest.mark.slow
def test_a_server_that_hangs_answers_late(opened: Opened) -> None:
    host = opened(STDIO, seconds=1.0)
    started(host, "a")
    assert called(host, "a", "bad", what="hang") == "error: the call took longer than 1 s"


@pytest.mark.slow
def test_an_object(opened: Opened) -> None:
    answers(opened({"mcp": {"python": f"{SERVER}:server"}}))


@pytest.mark.slow
def test_an_address(opened: Opened, over_http: dict[str, Any]) -> None:
    answers(opened(over_http))


@pytest.mark.slow
@pytest.mark.parametrize("over_http", ["Bearer s3cret"], indirect=True)
def test_an_address_that_wants_a_header(
    opened: Opened, over_http: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_TOKEN", "s3cret")
    config = EnvironmentConfig(tools=[over_http], tool_limits={"start_seconds": 10.0})
    key = re.compile(r"^environment\.tools\[0\]: MCP server ")
    with raises(ToolError, key, change=re.compile("url")):
        toolbox_of(config)
    answers(opened({"mcp": {**over_http["mcp"], "headers": {"Authorization": "Bearer $MCP_TOKEN", "X-Team": 3}}}))
    monkeypatch.setenv("MCP_TOKEN", "wr0ng")
    other = {"mcp": {**over_http["mcp"], "headers": {"authorization": "Bearer ${MCP_TOKEN}"}}}
    with pytest.raises(ToolError) as error:
        toolbox_of(EnvironmentConfig(tools=[other], tool_limits={"start_seconds": 10.0}))
    check_fields(error.value, key)
    assert "wr0ng" not in str(error.value)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (
            {"headers": {"X-API-Key": "s3cret"}},
            r"\[0\]\.mcp\.headers\.X-API-Key: .*'Bearer \$MCP_TOKEN'",
        ),
        (
            {"headers": {"Authorization": "Bearer s3cret$HOME"}},
            r"\[0\]\.mcp\.headers\.Authorization: ",
        ),
        (
            {"headers": {"Cookie": "$NOT_SET_OF_A_TEST"}},
            r"\[0\]\.mcp\.headers\.Cookie: .* NOT_SET_OF_A_TEST is not set",
        ),
        ({"headers": {"Authorization": "s3cret"}, "cwd": "."}, r"'headers': \['Authorization'\].*\{command"),
    ],
)
def test_headers_that_are_refused(server: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        toolbox_of(EnvironmentConfig(tools=[{"mcp": {"url": "http://127.0.0.1:9/mcp", **server}}]))
    assert "s3cret" not in str(error.value)


@pytest.mark.slow
def test_an_image_of_a_server_is_an_image(
    opened: Opened, qwen25_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    png = BytesIO()
    Image.new("RGB", (5, 4), (255, 0, 0)).save(png, "PNG")
    host = opened({"mcp": {"python": f"{SERVER}:server"}})
    started(host, "a")
    host.step("a", Answer("", ({"id": "c", "name": "picture", "arguments": {"png": png.getvalue().hex()}},)))
    found = result(host, "a")
    assert isinstance(found, Observation)
    [message], [media] = found.messages, found.media
    parts = [{"type": "text", "text": "before\nit"}, {"type": "image"}, {"type": "text", "text": "after"}]
    assert message.content == parts
    assert images(media)[0].size == (5, 4) and images(media)[0].getpixel((4, 3)) == (255, 0, 0)
    read = TemplateCodec(AutoTokenizer.from_pretrained(qwen25_folder)).read(found)  # for a model of text
    assert (read.messages[0].content, read.media) == ("before\nit[image]after", ())
    assert "a tool gave an image, but the model reads only text" in caplog.text
    assert called(host, "a", "picture", png="00").startswith("error: the server gave an image that cannot be read: ")


def answers(host: EnvironmentHost) -> None:
    started(host, "a")
    assert called(host, "a", "add", a=2, b=3) == "5"
    assert called(host, "a", "bad", what="no").startswith("error: ")
    host.close("a")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "kind", "said"),
    [
        ({"command": ["no-such-program"]}, ToolError, r"environment\.tools\[0\]: .*no-such-program.*: .*FileNotFound"),
        ({"command": [sys.executable, "-c", "1"]}, ToolError, r"environment\.tools\[0\]: .*python.*: "),
        ({"command": [sys.executable, "-c", "import time; time.sleep(99)"]}, ToolError, r"\b2 s; .*start_seconds"),
        ({"url": "http://127.0.0.1:9/mcp"}, ToolError, r"http://127\.0\.0\.1:9/mcp.*command or url"),
        ({"comand": ["x"]}, ConfigError, r"environment\.tools\[0\]\.mcp=.*; expected \{command: \[\.\.\.\]"),
        ({"python": "nowhere.py:server"}, ConfigError, r"environment\.tools\[0\]\.mcp\.python: nowhere\.py:serv"),
    ],
)  # fmt: skip
def test_what_does_not_start(server: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        toolbox_of(EnvironmentConfig(tools=[{"mcp": server}], tool_limits={"start_seconds": 2.0}))
