# SPDX-License-Identifier: Apache-2.0
"""Runs that were made to show files from elsewhere, to hide other runs, or to hold the server."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.viewer.conftest import DIGEST
from whet.plugins.viewer import server as viewer
from whet.plugins.viewer.server import open_server
from whet.tracking.runs import is_locked, read_run

SECRET = {"step": 7, "secret": 42.0}


@pytest.fixture
def port(folder: Path) -> Iterator[int]:
    shutil.copytree(folder / "one", folder / "bad")
    server = open_server(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def ask(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    response = connection.getresponse()
    found = response.status, response.read()
    connection.close()
    return found


def read(port: int, path: str) -> Any:
    status, content = ask(port, path)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    assert status == 200, (path, content)
    return json.loads(content, parse_constant=refuse)


def replaced(path: Path, by: str, elsewhere: Path) -> None:
    """Puts a link to a file of somebody else, a pipe or a folder in the place of a file."""
    path.unlink()
    if by == "link":
        path.symlink_to(elsewhere)
    elif by == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


FILES = ["metrics.jsonl", "timings.jsonl", "config.yaml", "run.json", ".lock", "rollouts/step_000001.jsonl"]
FILES += ["tokens/step_000001.jsonl", f"media/{DIGEST}.png"]
ASKED = [
    "/api/runs",
    "/api/curves?run=bad&names=secret,critic/score/mean",
    "/api/seconds?run=bad",
    "/api/config?run=bad",
]
ASKED += ["/api/trajectories?run=bad", "/api/trajectories?run=bad&text=secret", f"/media/bad/{DIGEST}"]
ASKED += ["/api/trajectories?run=bad&step=1", "/api/trajectory?run=bad&kind=step&step=1&line=0"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("by", ["link", "pipe", "folder"])
@pytest.mark.parametrize("name", FILES)
def test_only_plain_files_of_the_run_are_read(
    name: str, by: str, port: int, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret"
    elsewhere.write_text(json.dumps({**SECRET, "uid": "0:0:0", "response": "secret", "state": "failed"}) + "\n")
    path = folder / "bad" / name
    path.touch()
    replaced(path, by, elsewhere)
    for each in ASKED:
        status, content = ask(port, each)
        assert status in (200, 404) and b"42.0" not in content and b'"secret' not in content, each
        assert elsewhere.read_bytes() != content
    names = [run["id"] for run in read(port, "/api/runs")["runs"]]
    assert {"deep/two", "one"} <= {*names}
    assert read(port, "/api/trajectories?run=one")["total"] > 0
    if name in ("metrics.jsonl", ".lock"):  # `whet runs` reads them too
        is_locked(folder / "bad")
        if by == "pipe":
            read_run(folder / "bad")


def test_a_folder_that_leads_elsewhere_is_not_read(port: int, folder: Path) -> None:
    for name in ("rollouts", "tokens", "media"):
        shutil.rmtree(folder / "bad" / name)
        (folder / "bad" / name).symlink_to(folder / "one" / name)  # of another run
    assert read(port, "/api/trajectories?run=bad")["total"] == 0
    assert ask(port, f"/media/bad/{DIGEST}")[0] == 404
    assert ask(port, "/api/trajectory?run=bad&kind=step&step=1&line=0")[0] == 404


LINES = [
    '{"step": 1e400, "critic/score/mean": 1}',
    '{"step": -1e400}',
    '{"step": NaN, "x": 1}',
    '{"step": -5, "x": 1}',
    '{"step": 9e300, "x": 1}',
    '{"step": ' + "9" * 4000 + ', "x": 1}',
    '{"step": ' + "9" * 5000 + "}",
    '{"step": 3, "critic/score/mean": 1e400, "time/step": -1e400, "nan": NaN}',
    '{"step": 3, "critic/score/mean": ' + "9" * 400 + ', "time/rollout": ' + "9" * 400 + "}",
    '{"step": "x"}',
    '{"step": [1]}',
    "[" * 100_000,
    "null",
    "5",
]
ROLLOUTS = [
    '{"uid": "0:9:0", "tokens": 1e400}',
    '{"uid": "0:9:0", "turns": 1e400, "reward": 1}',
    '{"uid": "0:9:0", "reward": NaN, "accuracy": 1e400, "mean_log_prob": -1e400, "prompt": "p"}',
    '{"uid": "0:9:0", "reward": ' + "9" * 400 + "}",
    '{"uid": "0:9:0", "failure": "text", "steps": [1, "x", null], "reward": 1}',
    '{"uid": "0:9:0", "failure": [1], "steps": {"agent": 1}, "prompt": 5, "response": [NaN]}',
    '{"uid": "0:9:0", "steps": [{"agent": ["a"], "player": {"b": 1e400}}], "media": NaN}',
    '{"uid": [1e400], "tokens": {"a": 1}}',
]


@pytest.mark.timeout(60)
def test_numbers_that_no_page_can_show(port: int, folder: Path) -> None:
    for line in LINES:
        for name in ("metrics.jsonl", "timings.jsonl"):
            with (folder / "bad" / name).open("a") as file:
                file.write(line + "\n")
        runs = {run["id"]: run for run in read(port, "/api/runs")["runs"]}
        assert {*runs} == {"bad", "deep/two", "one"} and runs["bad"]["step"] in (2, 3), line[:60]
        shown = ",".join(runs["bad"]["metrics"])
        for path in (f"/api/curves?run=bad&names={shown}", "/api/seconds?run=bad"):
            read(port, path)
    (folder / "bad" / "config.yaml").write_text("trainer:\n  total_steps: " + "9" * 5000 + "\n")
    assert read(port, "/api/runs")["runs"][0]["total"] is None


@pytest.mark.timeout(60)
def test_trajectories_that_no_page_can_show(port: int, folder: Path) -> None:
    whole = read(port, "/api/trajectories?run=bad&step=1")["total"]
    with (folder / "bad/rollouts/step_000001.jsonl").open("a") as file:
        file.writelines(line + "\n" for line in ROLLOUTS)
    with (folder / "bad/tokens/step_000001.jsonl").open("a") as file:
        file.write('{"uid": "0:9:0", "log_probs": [NaN, 1e400, null]}\n{"uid": 5}\n{"uid": ' + "[" * 990 + "\n")
    for sort in ("file", "best", "worst", "longest", "turns", "unlikely"):
        found = read(port, f"/api/trajectories?run=bad&step=1&sort={sort}")
        assert found["total"] >= whole + 4
    for row in found["rows"]:
        read(port, f"/api/trajectory?run=bad&kind=step&step=1&line={row['line']}")


def is_open(connection: socket.socket) -> bool:
    """Sends another byte of a head that never ends; tells whether the server still takes it."""
    connection.settimeout(0.01)
    try:
        connection.sendall(b"G")
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


@pytest.mark.timeout(60)
def test_a_head_that_never_ends_is_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewer, "HEAD_SECONDS", 0.5)
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    started = time.monotonic()
    while slow:
        assert time.monotonic() - started < 10
        time.sleep(0.1)
        slow = [each for each in slow if is_open(each)]
    assert read(port, "/api/runs")["runs"]
