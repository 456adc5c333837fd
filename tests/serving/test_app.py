# SPDX-License-Identifier: Apache-2.0
"""The application in this process, in front of an engine that has failed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from whet.models.load import load_tokenizer, stop_token_ids
from whet.serving.app import App, Settings
from whet.serving.bodies import BodyReader
from whet.serving.engine_thread import EngineThread

SETTINGS = Settings(
    model="m",
    name=None,
    follow=False,
    best=False,
    engine="native",
    option={},
    tool_parser=None,
    dtype="float32",
    host="127.0.0.1",
    port=0,
    api_key=None,
    max_tokens=100,
    max_running=4,
    max_waiting=4,
    max_body_mib=1.0,
    deadline_seconds=60.0,
    stop_seconds=1.0,
    trust_remote_code=False,
)


class Broken:
    """An engine that fails at the first poll."""

    def poll(self, timeout_seconds: float) -> Any:
        raise RuntimeError("a broken device")

    def status(self) -> Any:
        raise AssertionError("nothing asks an engine that has failed")


@pytest.fixture
def client(qwen25_folder: Path) -> TestClient:
    dead = threading.Event()
    thread = EngineThread(Broken(), on_death=lambda error: dead.set())  # type: ignore[arg-type]
    assert dead.wait(20)
    tokenizer = load_tokenizer(qwen25_folder)
    reader = BodyReader("m", tokenizer, stop_token_ids(qwen25_folder, tokenizer), 512, 512, 100)
    return TestClient(App(reader, thread, SETTINGS, dict).asgi)


@pytest.mark.timeout(60)
def test_an_engine_that_has_failed_answers_503_to_all(client: TestClient) -> None:
    what = "the rollout engine failed: RuntimeError: a broken device"
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "failed") and what in health.json()["message"]
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    asked = [
        client.get("/metrics"),
        client.get("/v1/models"),
        client.post("/v1/completions", json={"model": "m", "prompt": "hi"}),
    ]
    asked += [client.post("/v1/chat/completions", json={**chat, "stream": stream}) for stream in (False, True)]
    for response in asked:
        assert response.status_code == 503 and what in response.json()["error"]["message"], response.url
