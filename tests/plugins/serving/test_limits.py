# SPDX-License-Identifier: Apache-2.0
"""Refusals of a server, and the end of requests that nobody waits for."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from echo_engine import STUCK_SECONDS
from server_processes import ECHO, Running, Start, started

pytestmark = pytest.mark.slow
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DEADLINE = 2.0
SLOW = "slow " + "one two three " * 10


@pytest.fixture(scope="module")
def server(qwen25_folder: Path) -> Iterator[Running]:
    options: dict[str, object] = {"--max-running": 1, "--max-waiting": 1, "--max-body-mib": 0.01}
    words = [word for pair in options.items() for word in pair]
    with started(qwen25_folder, "--name", "m", "--engine", ECHO, "--deadline-seconds", DEADLINE, *words) as running:
        yield running


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def asking(text: str, **options: object) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **options}


def metric(http: httpx.Client, name: str) -> float:
    """The value of a line of /metrics."""
    [value] = re.findall(rf"^{re.escape(name)} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return float(value)


def wait_until_idle(http: httpx.Client) -> None:
    """Returns when the engine has no request, which must be long before any of these ends by itself."""
    until = time.monotonic() + 1.0
    while metric(http, "whet_samples_running") + metric(http, "whet_samples_waiting"):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_large(http: httpx.Client, is_chunked: bool) -> None:
    body = json.dumps(asking("a" * 20_000)).encode()
    content: Any = iter([body]) if is_chunked else body
    response = http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 413
    error = response.json()["error"]
    assert error["code"] == "body_too_large" and re.search(r"\b10,486\b", error["message"])


@pytest.mark.parametrize(
    ("body", "kind", "status", "param", "code", "said"),
    [
        (b"{", "application/json", 400, None, None, "not JSON.*char 1"),
        (b'{"model": NaN}', "application/json; charset=utf-8", 400, "model", "invalid_value", "nan"),
        (b'{"model": "m", "\\ud800": 1}', "application/json", 400, "\\ud800", "unknown_parameter", r"\\ud800"),
        (b"[" * 9000, "application/json", 400, None, None, "not JSON.*recursion"),
        (b"\xff", "application/json", 400, None, None, "not JSON.*0xff"),
        (b"[1]", "application/json", 400, None, None, "JSON list"),
        (b"{}", "text/plain", 415, None, None, "text/plain.*application/json"),
    ],
)
def test_bodies_that_are_no_request(
    http: httpx.Client, body: bytes, kind: str, status: int, param: str | None, code: str | None, said: str
) -> None:
    response = http.post(CHAT, content=body, headers={"content-type": kind})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code)
    assert re.search(said, error["message"]), error


def test_paths_and_methods_that_are_not_there(http: httpx.Client) -> None:
    for response, status in ((http.get("/v1/embeddings"), 404), (http.get(CHAT), 405)):
        assert response.status_code == status
        assert "POST /v1/chat/completions" in response.json()["error"]["message"]


def test_a_full_server_refuses_and_goes_on(server: Running, http: httpx.Client) -> None:
    with pytest.raises(openai.BadRequestError, match=r"\b3\b.*\b2\b") as error:
        server.client().chat.completions.create(**asking("hi", n=3))
    assert error.value.param == "n"
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda _: httpx.post(server.address + CHAT, json=asking("slow yes")), range(6)))
    codes = [response.status_code for response in found]
    assert codes.count(200) >= 2 and codes.count(429) >= 1 and len(codes) == codes.count(200) + codes.count(429)
    refused = next(response for response in found if response.status_code == 429)
    assert refused.headers["retry-after"] == "1" and refused.json()["error"]["code"] == "server_full"
    assert http.post(CHAT, json=asking("yes")).json()["choices"][0]["message"]["content"] == "yes"


def test_samples_over_max_running_wait(server: Running, http: httpx.Client) -> None:
    with server.client().chat.completions.create(**asking("slow one two", n=2), stream=True) as chunks:
        next(chunks)
        running, waiting = (metric(http, f"whet_samples_{each}") for each in ("running", "waiting"))
        assert (running, waiting) == (1, 1)
        order = [chunk.choices[0].index for chunk in chunks]
    assert order == sorted(order) and set(order) == {0, 1}  # one after the other


def test_a_request_that_takes_too_long(server: Running, http: httpx.Client) -> None:
    response = http.post(CHAT, json=asking(SLOW))
    assert response.status_code == 504 and response.json()["error"]["code"] == "deadline_exceeded"
    chunks, num_chunks = server.client().chat.completions.create(**asking(SLOW), stream=True), 0
    with pytest.raises(openai.APIError, match=r"\b2 s\b") as late:
        for _ in chunks:
            num_chunks += 1
    assert num_chunks > 5 and late.value.code == "deadline_exceeded"
    wait_until_idle(http)


def test_an_engine_that_does_not_come_back_in_time(server: Running, http: httpx.Client) -> None:
    """As while a lost server of vLLM is started again: requests end at the deadline, and the rest answers at once."""
    begun = time.monotonic()
    lines = http.post(CHAT, json=asking("stuck here", stream=True)).text.split("\n\n")
    assert DEADLINE <= time.monotonic() - begun < STUCK_SECONDS - 1
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["delta"]["content"]
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout_error")
    assert re.search(r"\b2 s\b.*engine", error["message"])
    pages = [http.get(path).text for path in ("/health", "/metrics", "/v1/models")]
    assert time.monotonic() - begun < STUCK_SECONDS  # the engine had not come back
    assert json.loads(pages[0])["status"] == "busy" and "whet_samples_running 1" in pages[1] and "weights-0" in pages[2]
    time.sleep(max(0.0, begun + STUCK_SECONDS + 0.5 - time.monotonic()))
    assert http.get("/health").json() == {"status": "ok"}
    assert http.post(CHAT, json=asking("yes")).json()["choices"][0]["message"]["content"] == "yes"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(server: Running, http: httpx.Client, stream: bool) -> None:
    before = http.get("/metrics").text.count(f'path="{CHAT}",status="499"')
    if stream:
        with httpx.stream("POST", server.address + CHAT, json=asking(SLOW, stream=True, n=2)) as response:
            assert next(response.iter_lines()).startswith("data: ")
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.address + CHAT, json=asking(SLOW), timeout=0.3)
    wait_until_idle(http)
    assert metric(http, f'whet_requests_total{{path="{CHAT}",status="499"}}') >= max(1, before)


def test_metrics_count(http: httpx.Client) -> None:
    names = ("whet_prompt_tokens_total", "whet_completion_tokens_total", "whet_time_to_first_token_seconds_count")
    before = [metric(http, name) for name in names]
    usage = http.post(CHAT, json=asking("one two")).json()["usage"]
    lines = http.post(CHAT, json=asking("one two", stream=True)).text
    assert lines.endswith("data: [DONE]\n\n")
    after = [metric(http, name) for name in names]
    grown = [new - old for new, old in zip(after, before, strict=True)]
    assert grown == [2 * usage["prompt_tokens"], 2 * usage["completion_tokens"], 1]
    assert metric(http, "whet_weights_version") == 0
    types = re.findall(r"^# TYPE (\w+) (\w+)$", http.get("/metrics").text, re.MULTILINE)
    assert len(types) == 9 and {kind for _, kind in types} == {"counter", "gauge", "histogram"}


def test_an_engine_that_fails_ends_the_server_and_says_so(start: Start, qwen25_folder: Path) -> None:
    server = start(qwen25_folder, "--name", "m", "--engine", ECHO)
    chunks = server.client().chat.completions.create(**asking(SLOW), stream=True)
    next(chunks)
    with pytest.raises(openai.InternalServerError, match="the last word") as error:
        server.client().chat.completions.create(**asking("die"))
    assert error.value.status_code == 503
    with pytest.raises(openai.APIError, match="RuntimeError: the last word"):
        list(chunks)
    status, printed = server.ended()
    assert status == 2
    assert re.search(r"EngineError: rollout engine: .*RuntimeError: the last word was said", printed)


def test_requests_that_do_not_end_in_time_are_cut_at_the_stop(start: Start, qwen25_folder: Path) -> None:
    server = start(qwen25_folder, "--name", "m", "--engine", ECHO, "--stop-seconds", 1)
    chunks = server.client().chat.completions.create(**asking(SLOW * 4), stream=True)
    next(chunks)
    started_at = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match=r"server: stopping"):
        list(chunks)
    status, printed = server.ended()
    assert (status, time.monotonic() - started_at < 10) == (0, True)
    assert "Traceback" not in printed, printed
