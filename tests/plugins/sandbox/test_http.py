# SPDX-License-Identifier: Apache-2.0
"""The service and its client give the same results as the local sandbox, failures included."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

import whet.http
from tests.first import first
from tests.plugins.sandbox.conftest import needs_bubblewrap
from tests.raising import raises
from whet.errors import ConfigError, SandboxError
from whet.plugins.sandbox import http, server as sandbox_service
from whet.plugins.sandbox.command import serve_sandbox
from whet.plugins.sandbox.http import HttpSandbox
from whet.plugins.sandbox.local import LocalSandbox
from whet.plugins.sandbox.server import SandboxApp
from whet.plugins.scores.code import Suite, compute_score, run_tests
from whet.programs.protocol import Language, Limits, Program, open_sandbox


@contextmanager
def served(box: LocalSandbox, api_key: str | None = None) -> Iterator[str]:
    """A service over a local sandbox."""
    config = uvicorn.Config(SandboxApp(box, 2, api_key=api_key).asgi, host="127.0.0.1", port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def address(unisolated: LocalSandbox) -> Iterator[str]:
    """A service over a sandbox without isolation."""
    with served(unisolated) as found:
        yield found


@pytest.fixture(scope="module")
def isolated_address(sandbox: LocalSandbox) -> Iterator[str]:
    """A service over bubblewrap."""
    with served(sandbox) as found:
        yield found


PROGRAMS = {
    "right": Program("python", "print(int(input()) * 2)"),
    "exit code": Program("python", "import sys; print('out'); sys.stderr.write('why'); sys.exit(3)"),
    "exception": Program("python", "1 / 0"),
    "too much output": Program("python", "while True: print('a' * 1000)", Limits(seconds=5.0)),
    "too much memory": Program("python", "x = bytearray(10**9)", Limits(memory_bytes=2**28)),
    "does not compile": Program("cpp", "int main( {"),
    "crashes": Program("cpp", "int main() { int *a = nullptr; return *a; }"),
    "files": Program("bash", "cat in.txt; echo left > a.txt", files={"in.txt": b"given"}, collect=["a.txt", "b.txt"]),
    "too late": Program("python", "print('begun', flush=True)\nwhile True: pass", Limits(seconds=1.0)),
    "compiled": Program("cpp", "#include <iostream>\nint main() { int a; std::cin >> a; std::cout << 2 * a; }"),
}


@pytest.mark.parametrize("name", first(8, PROGRAMS, others=pytest.mark.slow))
def test_the_service_gives_what_the_sandbox_gives(name: str, address: str, unisolated: LocalSandbox) -> None:
    program, inputs = PROGRAMS[name], [b"4\n", b"21\n"]
    here, there = unisolated.run(program, inputs), HttpSandbox(address).run(program, inputs)
    for one, other in zip(here, there, strict=True):
        assert (one.end, one.code, one.files) == (other.end, other.code, other.files)
        if name != "too much output":
            assert (one.stdout, one.stderr) == (other.stdout, other.stderr)


@pytest.mark.parametrize(
    "source", ["def f(x): return x * x", "def f(x): return 0", "import sys; sys.exit(0)", "def f(x:"]
)
def test_tests_of_a_function_give_the_same(source: str, address: str, unisolated: LocalSandbox) -> None:
    tests = Suite("code", ["assert f(2) == 4", "assert f(3) == 9", "assert f(0) == 0"])
    here, there = (run_tests(box, "python", source, tests, Limits()) for box in (unisolated, HttpSandbox(address)))
    assert [ok for ok, _ in here] == [ok for ok, _ in there]
    assert here[0][0] == (source == "def f(x): return x * x")


ANSWERS = {  # a language after the fence, a program that writes 6, and its score
    "python": ("print(6)", 1.0),
    "c": ('#include <stdio.h>\nint main() { puts("6"); }', 1.0),
    "cpp": ("#include <iostream>\nint main() { std::cout << 6; }", 1.0),
    "bash": ("echo 6", 1.0),
    "js": ("console.log(6)", 1.0 if shutil.which("node") else None),
    "perl": ("print 6", 1.0),  # of the table
    "broken": ("print 6", 0.0),  # its compiler is never happy
    "lost": ("print 6", None),  # its command is nowhere
    "java": ("class A {}", 0.0),  # the others are in no table
    "rust": ("fn main() {}", 0.0),
    "cobol": ("STOP RUN.", 0.0),
}
TABLE = {
    "perl": {"file": "a.pl", "run": ["perl", "a.pl"]},
    "broken": {"file": "a.pl", "run": ["perl", "a.pl"], "compile": ["false"], "compiled": "a"},
    "lost": {"file": "a", "run": ["no-such-command"]},
}


@needs_bubblewrap
@pytest.mark.parametrize("language", first(1, ANSWERS, others=pytest.mark.slow))
def test_an_answer_has_the_same_score_in_every_language(language: str, isolated_address: str) -> None:
    source, score = ANSWERS[language]
    text, truth = f"```{language}\n{source}\n```", {"inputs": ["1"], "outputs": ["6"]}
    for sandbox in ("bubblewrap", isolated_address):
        if score is None:  # fails for want of a command, and is no score of the answer
            with pytest.raises(SandboxError, match=r"\blost\b.*no-such-command"):
                compute_score(text, truth, sandbox=sandbox, languages=TABLE)
        else:
            assert compute_score(text, truth, sandbox=sandbox, languages=TABLE)["reward"] == score
    before = "```python\nprint(6)\n```\nThe same again:\n"  # the last block in a known language counts
    found = [compute_score(before + text, truth, sandbox=each)["pred"] for each in ("bubblewrap", isolated_address)]
    assert found[0] == found[1]


def test_options_of_this_machine_are_refused_for_a_service(address: str) -> None:
    for options in ({"python": sys.executable}, {"paths": ("/usr",)}):
        with raises(SandboxError, "python, paths", found=re.compile(re.escape(address)), change=re.compile("--python")):
            open_sandbox(address, **options)  # type: ignore[arg-type]


def test_a_service_that_takes_no_languages(service: tuple[HttpSandbox, list[Any]]) -> None:
    box, answers = service
    assert "java" in box.languages and "c" not in box.languages  # SandboxFusion's
    with raises(SandboxError, "languages", found=re.compile(f"^perl.* {box.address} ")):
        HttpSandbox(box.address, {"perl": Language("a.pl", ["perl", "a.pl"])}).run(Program("perl", "1"), [b""])
    assert answers == []


def test_the_answer_has_sandbox_fusions_fields(address: str) -> None:
    body = {"code": "print(input())", "language": "python", "stdin": "hello", "compile_timeout": 5, "run_timeout": 5}
    answer = httpx.post(f"{address}/run_code", json=body).json()
    assert answer["status"] == "Success" and answer["compile_result"] is None and answer["files"] == {}
    result = answer["run_result"]
    assert (result["status"], result["return_code"], result["stdout"], result["stderr"]) == (
        "Finished",
        0,
        "hello\n",
        "",
    )
    assert 0 < result["execution_time"] < 5 and "executor_pod_name" in answer
    late = httpx.post(f"{address}/run_code", json={**body, "code": "while True: pass", "run_timeout": 0.5}).json()
    assert late["status"] == "Failed" and late["run_result"]["status"] == "TimeLimitExceeded"
    unknown = httpx.post(f"{address}/run_code", json={**body, "language": "cobol"}).json()
    assert unknown["status"] == "SandboxError" and "unknown language cobol" in unknown["message"]
    assert httpx.post(f"{address}/run_code", json={"language": "python"}).status_code == 422
    is_json = {"Content-Type": "application/json"}
    assert httpx.post(f"{address}/run_code", content=b"{", headers=is_json).status_code == 422
    assert httpx.get(f"{address}/v1/ping").text == "pong"


ANOTHERS = "the answer of another client"
READS = [
    "/etc/passwd",
    "../secret",
    "a/../../secret",
    "/proc/self/environ",
    "found",
    "folder/secret",
    "process/1/root/etc/passwd",
]


@pytest.mark.slow
def test_files_of_others_are_not_fetched(address: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(ANOTHERS)
    code = f"""
import os
os.symlink({str(tmp_path / "secret")!r}, "found"); os.symlink({str(tmp_path)!r}, "folder")
os.symlink("/proc", "process")
os.mkdir("own"); open("own/file", "w").write("mine")
"""
    for name in [*READS, str(tmp_path / "secret"), f"folder/../{tmp_path}/secret"]:
        body = {"code": code, "language": "python", "fetch_files": ["own/file", name]}
        answer = httpx.post(f"{address}/run_code", json=body).json()
        assert {*answer["files"]} <= {"own/file"}, name
        assert answer["status"] == ("Success" if answer["files"] else "SandboxError")
    for name in ("/tmp/x", "../x", "a/../../x"):  # nor are they written
        body = {"code": "1", "language": "python", "files": {name: "eA=="}}
        assert httpx.post(f"{address}/run_code", json=body).json()["status"] == "SandboxError"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "text/plain"}, 415),  # which any web page sends
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=application/json"}, 415),
        ({"Host": "attacker.example"}, 403),  # a name that resolves to this machine
        ({"Host": "127.0.0.1.attacker.example:8080"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "localhost:1"}, 200),
        ({"Origin": "http://attacker.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:3000"}, 200),
    ],
)
def test_no_web_page_runs_programs(address: str, headers: dict[str, str], status: int) -> None:
    body = json.dumps({"code": "print(6)", "language": "python"}).encode()
    found = httpx.post(f"{address}/run_code", content=body, headers={"Content-Type": "application/json", **headers})
    assert found.status_code == status and (b"6" in found.content) == (status == 200)


@pytest.mark.slow
def test_a_service_with_a_key(unisolated: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(unisolated, api_key="se cret") as address:
        body = {"code": "print(6)", "language": "python"}
        for key in ("", "Bearer", "Bearer se", "Bearer se cret2", "se cret", "Bearer s\u00e9".encode()):
            for found in (
                httpx.post(f"{address}/run_code", json=body, headers={"Authorization": key}),
                httpx.get(f"{address}/v1/languages", headers={"Authorization": key}),
            ):
                assert found.status_code == 401 and "KEY" in found.text
        program = Program("python", "print(6)")
        with pytest.raises(SandboxError) as refused:
            HttpSandbox(address).run(program, [b""])
        assert http.KEY in str(refused.value) and "401" in str(refused.value)
        monkeypatch.setenv(http.KEY, "se cret")
        assert HttpSandbox(address).run(program, [b""])[0].stdout == b"6\n"
        own = {"Host": "sandbox.lab", "Authorization": "Bearer se cret"}
        assert httpx.post(f"{address}/run_code", json=body, headers=own).status_code == 200


def test_an_open_service_without_a_key_is_told(
    unisolated: LocalSandbox, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)
    with sandbox_service.bound_to("127.0.0.1", 0) as bound:
        for host, key, told in (("127.0.0.1", None, 0), ("0.0.0.0", "k", 0), ("0.0.0.0", None, 1), ("lab7", "", 2)):
            sandbox_service.serve(unisolated, bound, host, 1, key)
            assert len(caplog.records) == told
        assert caplog.records[0].args == ("0.0.0.0", bound.getsockname()[1])


def test_a_port_in_use_is_an_error_before_the_address_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = list[socket.socket]()
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: served.extend(sockets))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with raises(ConfigError, f"--host 127.0.0.1 --port {port}"):
            serve_sandbox(port=port, sandbox="unisolated")
    assert not capsys.readouterr().out
    serve_sandbox(port=port, sandbox="unisolated")
    assert f"http://127.0.0.1:{port}/run_code" in capsys.readouterr().out and len(served) == 1


def test_a_body_that_never_ends(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_service, "BODY_SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=10) as slow:
        slow.sendall(b"POST /run_code HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n")
        slow.sendall(b"Content-Length: 100\r\n\r\n{")
        assert slow.recv(100).startswith(b"HTTP/1.1 408")


class Answers(BaseHTTPRequestHandler):
    """A service that gives one prepared answer after the other."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        status, body = self.server.answers.pop(0)  # type: ignore[attr-defined]
        if status is None:
            self.connection.close()
            return
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HttpSandbox, list[Any]]]:
    monkeypatch.setattr(whet.http, "FIRST_WAIT_SECONDS", 0.01)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.answers = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # looks 100 times a second
    yield HttpSandbox(f"http://127.0.0.1:{server.server_port}/run_code"), server.answers  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


FINE = {"status": "Success", "run_result": {"status": "Finished", "return_code": 0, "stdout": "1", "stderr": None}}


@pytest.mark.parametrize(
    "before",
    [[(503, b"busy")], [(429, b"")], [(None, b"")], [(200, b"nonsense")], [(502, b""), (None, b""), (500, b"")][:2]],
)
def test_a_service_that_is_busy_is_asked_again(before: list[Any], service: tuple[HttpSandbox, list[Any]]) -> None:
    box, answers = service
    answers += [*before, (200, FINE)]
    [ran] = box.run(Program("python", "1"), [b""])
    assert (ran.end, ran.stdout, ran.stderr) == ("ok", b"1", b"") and not answers


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([(503, b"busy")] * 4, r"\(status 503: busy\)"),
        ([(400, b"what?")], r"\(status 400: what\?\)"),
        ([(200, {"status": "SandboxError", "message": "no node"})], ": no node$"),
        ([(200, {"status": "Success"})], "run_result.*{'status': 'Success'}"),
        ([(200, [1])], r" \[1\]"),
        ([(200, {"run_result": {"return_code": "x"}})], "'x'"),
        ([(200, {"run_result": {"return_code": [1]}})], r"\[1\]"),
        ([(200, {"run_result": {"return_code": 0, "stdout": 5}})], "'stdout': 5"),
        ([(200, {"run_result": {"return_code": 0}, "files": {"a": "%"}})], "'%'"),
        ([(200, {"run_result": {"return_code": 0}, "files": ["a"]})], r"\['a'\]"),
        ([(200, {"run_result": {"return_code": 0, "execution_time": [1]}})], r"\[1\]"),
        ([(200, b'{"run_result": {"return_code": 1e400}}')] * 4, "no float"),
        ([(200, b"[" * 10**5)] * 4, "levels"),
    ],
)
def test_a_service_that_fails_is_no_failure_of_the_program(
    given: list[Any], found: str, service: tuple[HttpSandbox, list[Any]]
) -> None:
    box, answers = service
    answers += given
    with raises(SandboxError, f"sandbox at {box.address}", found=re.compile(found)):
        box.run(Program("python", "1"), [b""])


def test_an_address_where_nothing_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whet.http, "FIRST_WAIT_SECONDS", 0.01)
    with raises(SandboxError, "sandbox at http://127.0.0.1:9", found=re.compile(r"Errno 111")):
        HttpSandbox("http://127.0.0.1:9").run(Program("python", "1"), [b""])


@pytest.mark.parametrize(
    ("result", "end"),
    [
        ({"run_result": {"status": "Finished", "return_code": 1}}, "failed"),
        ({"run_result": {"status": "TimeLimitExceeded", "return_code": None}}, "timeout"),
        ({"compile_result": {"status": "Finished", "return_code": 1, "stderr": "e"}, "run_result": None}, "compile"),
    ],
)
def test_ends_of_a_service_that_says_no_more(result: Any, end: str, service: tuple[HttpSandbox, list[Any]]) -> None:
    box, answers = service
    answers.append((200, {"status": "Failed", **result}))
    assert box.run(Program("cpp", "1"), [b""])[0].end == end
