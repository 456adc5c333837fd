# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import http.client
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.viewer.conftest import DIGEST
from tests.raising import raises
from whet.errors import ConfigError
from whet.plugins.viewer.server import is_own, open_server


@pytest.fixture
def port(folder: Path) -> Iterator[int]:
    server = open_server(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def ask(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    found = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return found


def read(port: int, path: str) -> Any:
    status, _, content = ask(port, path)
    assert status == 200, content
    return json.loads(content)


def test_the_page_and_its_files_come_with_headers_that_forbid_other_sources(port: int) -> None:
    status, headers, content = ask(port, "/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'; script-src 'self'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    names = [part.split('"')[0] for part in content.decode().split("/static/")[1:]]
    assert {"app.js", "style.css", "uplot.js", "uplot.css", "icon.png"} == set(names)
    for name in (*names, "dom.js", "charts.js", "trajectories.js", "tokens.js"):
        assert ask(port, f"/static/{name}")[0] == 200
    assert b"http://" not in content and b"https://" not in content


def test_runs_curves_and_trajectories(port: int) -> None:
    two, one = read(port, "/api/runs")["runs"]
    assert (two["id"], two["step"], two["metrics"]) == ("deep/two", 1, ["sft/loss"])
    assert (one["id"], one["total"], one["files"]["step"]) == ("one", 9, [1, 2])
    assert read(port, "/api/curves?run=one&names=time/step,critic/score/mean") == {
        "time/step": [[1, 2], [3.0, 3.0]],
        "critic/score/mean": [[1, 2], [0.25, 0.5]],
    }
    assert read(port, "/api/seconds?run=one")["sums"] == {"time/rollout": [2.0, 2.0], "time/step": [3.0, 3.0]}
    rows = read(port, "/api/trajectories?run=one&step=2&show=failed")["rows"]
    assert [(row["uid"], row["response"]) for row in rows] == [("0:3:0", "it broke")]
    assert read(port, "/api/trajectory?run=one&kind=step&step=1&line=2")["tokens"][0]["uid"] == "0:1:0"
    assert read(port, "/api/config?run=one")["text"].startswith("trainer:")


def test_an_image_is_sent_as_what_its_name_says(port: int, folder: Path) -> None:
    status, headers, content = ask(port, f"/media/one/{DIGEST}")
    assert (status, headers["Content-Type"]) == (200, "image/png")
    assert content == (folder / "one/media" / f"{DIGEST}.png").read_bytes()
    (folder / "one/media" / f"{'cd' * 32}.svg").write_text("<svg><script>1</script></svg>")
    assert ask(port, f"/media/one/{'cd' * 32}")[0] == 404  # a type that may hold programs


@pytest.mark.parametrize(
    "path",
    [
        *("/../../etc/passwd", "/static/../server.py", "/static/%2e%2e%2fserver.py", "/static/none.js", "/other"),
        *(
            "/api/config?run=..",
            "/api/config?run=/etc",
            "/api/config?run=one/../one",
            "/api/config",
            "/api/_path?run=one",
        ),
        *("/media/one/..%2fconfig.yaml", "/media/%252e%252e/x", "/api/trajectories?run=one&step=x"),
        *("/api/trajectories?run=one&kind=../tokens/step", "/api/trajectories?run=one&sort=uid"),
        "/api/trajectory?run=one&kind=step&step=1&line=99",
    ],
)
def test_nothing_else_is_answered(port: int, path: str) -> None:
    assert ask(port, path)[0] == 404


def test_a_name_that_resolves_to_this_machine_is_refused(port: int) -> None:
    assert ask(port, "/api/runs", Host="attacker.example")[0] == 403
    assert ask(port, "/api/runs", Host=f"localhost:{port}")[0] == 200
    assert is_own("[::1]:80", "127.0.0.1") and is_own("lab7:80", "lab7")
    assert not is_own("", "127.0.0.1") and not is_own("127.0.0.1.attacker.example", "127.0.0.1")


def test_only_reads_are_answered(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/api/runs", body=b"")
    assert connection.getresponse().status == 501
    connection.close()


def test_a_run_that_is_added_or_goes_on_is_seen(port: int, folder: Path) -> None:
    shutil.copytree(folder / "one", folder / "copy")
    assert [run["id"] for run in read(port, "/api/runs")["runs"]] == ["copy", "deep/two", "one"]
    with (folder / "one/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "critic/score/mean": 1.0}\n')
    assert read(port, "/api/curves?run=one&names=critic/score/mean")["critic/score/mean"][0] == [1, 2, 3]


def test_a_folder_without_runs_and_a_port_in_use_are_errors(tmp_path: Path, folder: Path, port: int) -> None:
    (tmp_path / "empty").mkdir()
    for name, found in (("empty", "run"), ("none", "folder")):
        with raises(ConfigError, f"{tmp_path}/{name}", found=re.compile(found), expected=re.compile("metrics.jsonl")):
            open_server(tmp_path / name)
    with raises(ConfigError, f"--host 127.0.0.1 --port {port}", found="Address already in use"):
        open_server(folder, port=port)
