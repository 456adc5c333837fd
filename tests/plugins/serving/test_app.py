# SPDX-License-Identifier: Apache-2.0
"""The application in this process, in front of engines that fail or hang, and a reader with a bug."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from whet.errors import CheckpointError
from whet.models.load import load_tokenizer, stop_token_ids
from whet.plugins.serving import app, server
from whet.plugins.serving.app import App, ServeSettings
from whet.plugins.serving.bodies import BodyReader
from whet.plugins.serving.engine_thread import EngineThread
from whet.rollout.protocol import Completion, Finished, Request, Status

SETTINGS = ServeSettings(
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
    return TestClient(App(reader, thread, SETTINGS, dict).asgi, base_url="http://127.0.0.1")


@pytest.mark.timeout(60)
def test_an_engine_that_has_failed_answers_503_to_all(client: TestClient) -> None:
    what = "RuntimeError: a broken device"
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


class Hanging:
    """An engine that does not come back from polling a request, as while it is started again."""

    def __init__(self) -> None:
        self.released, self.given, self.aborted = threading.Event(), list[str](), list[str]()

    def submit(self, request: Request) -> bool:
        self.given.append(request.uid)
        return True

    def poll(self, timeout_seconds: float) -> Any:
        if self.given:
            self.released.wait(30)
        return []

    def prompt_log_probs(self, prompt: Sequence[int], count: int) -> Any:
        raise AssertionError

    def abort(self, uids: set[str]) -> None:
        self.aborted += uids

    def status(self) -> Status:
        return Status(version=7, running=len(self.given) - len(self.aborted), waiting=0)

    def close(self) -> None:
        pass


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    engine = Hanging()
    yield engine
    engine.released.set()


@pytest.mark.timeout(60)
def test_the_deadline_holds_while_the_engine_hangs(
    qwen25_folder: Path, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "SLACK_SECONDS", 0.1)
    tokenizer = load_tokenizer(qwen25_folder)
    reader = BodyReader("m", tokenizer, stop_token_ids(qwen25_folder, tokenizer), 512, 512, 100)
    thread = EngineThread(hanging, on_death=lambda error: None)  # type: ignore[arg-type]
    thread.call(lambda: None).result()
    client = TestClient(
        App(reader, thread, replace(SETTINGS, deadline_seconds=0.2), dict).asgi, base_url="http://127.0.0.1"
    )
    assert client.get("/health").json() == {"status": "ok"}
    for more in ({"stream": False}, {"stream": True}, {"prompt_logprobs": 1}):
        begun = time.monotonic()
        response = client.post("/v1/completions", json={"model": "m", "prompt": "hi", **more})
        assert 0.3 <= time.monotonic() - begun < 10
        error = response.json()["error"]
        assert response.status_code == 504 and re.search(r"\b0\.2 s\b", error.pop("message"))
        assert error == {"type": "timeout_error", "param": None, "code": "deadline_exceeded"}
    monkeypatch.setattr(app, "BUSY_SECONDS", 0.1)
    busy = client.get("/health")
    assert busy.status_code == 200 and busy.json()["status"] == "busy"
    assert re.search(r"engine .*\b\d+ s\b", busy.json()["message"])
    metrics = client.get("/metrics").text
    assert "whet_weights_version 7" in metrics and 'path="/v1/completions",status="504"} 3' in metrics
    [card] = client.get("/v1/models").json()["data"]
    assert card["system_fingerprint"] == "weights-7"
    hanging.released.set()
    thread.stop()
    assert len(hanging.given) == 1 and hanging.aborted[:1] == hanging.given  # the second one left before it came


@pytest.mark.timeout(60)
def test_a_bug_is_an_error_of_the_api_and_is_logged(
    qwen25_folder: Path, hanging: Hanging, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(*_: object) -> Any:
        raise KeyError("lost")

    tokenizer = load_tokenizer(qwen25_folder)
    reader = BodyReader("m", tokenizer, stop_token_ids(qwen25_folder, tokenizer), 512, 512, 100)
    thread = EngineThread(hanging, on_death=lambda error: None)  # type: ignore[arg-type]
    client = TestClient(App(reader, thread, SETTINGS, dict).asgi, base_url="http://127.0.0.1")
    monkeypatch.setattr(BodyReader, "text", bug)
    response = client.post("/v1/completions", json={"model": "m", "prompt": "hi"})
    error = response.json()["error"]
    assert response.status_code == 500 and "KeyError" in error["message"] and "lost" not in error.pop("message")
    assert error == {"type": "server_error", "param": None, "code": None}
    [record] = [each for each in caplog.records if each.name == "whet.plugins.serving.app"]
    assert record.levelno == logging.ERROR and "/v1/completions" in record.getMessage()
    assert record.exc_info is not None and isinstance(record.exc_info[1], KeyError)
    assert 'path="/v1/completions",status="500"} 1' in client.get("/metrics").text


async def first_event(*_: object) -> Any:
    """Events of a request: one that no answer can use."""
    yield SimpleNamespace(index=0), None


@pytest.mark.timeout(60)
def test_a_bug_in_a_stream_is_its_last_event(
    qwen25_folder: Path, hanging: Hanging, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(qwen25_folder)
    reader = BodyReader("m", tokenizer, stop_token_ids(qwen25_folder, tokenizer), 512, 512, 100)
    thread = EngineThread(hanging, on_death=lambda error: None)  # type: ignore[arg-type]
    client = TestClient(App(reader, thread, SETTINGS, dict).asgi, base_url="http://127.0.0.1")
    monkeypatch.setattr(App, "_events", first_event)
    [line, end] = client.post("/v1/completions", json={"model": "m", "prompt": "hi", "stream": True}).text.split("\n\n")
    assert end == "" and json.loads(line.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "AssertionError" in caplog.text and "Traceback" in caplog.text
    assert 'path="/v1/completions",status="500"} 1' in client.get("/metrics").text


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("not enough memory"), CheckpointError("damaged")])
def test_the_next_checkpoint_is_loaded_after_any_error(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    folders = [tmp_path / f"global_step_{step}" for step in range(4)]
    coming = iter(folders)
    monkeypatch.setattr(server, "FOLLOW_SECONDS", 0.0)
    monkeypatch.setattr(server.checkpoint, "newest", lambda run: next(coming, folders[-1]))

    def load(self: object, source: Path) -> None:
        if source.name == "global_step_1":
            raise error

    monkeypatch.setattr(server._Server, "_load", load)
    following = server._Server.__new__(server._Server)
    following._settings, following._source = replace(SETTINGS, follow=True), str(folders[0])

    async def follow() -> None:
        task = asyncio.create_task(following._follow())
        while following._source != str(folders[3]):
            assert not task.done(), task.exception()
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(follow(), 20))
    [warning] = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert f"{folders[1]} was not loaded" in warning and warning.endswith(f" {folders[0]}")
    assert type(error).__name__ in warning and str(error) in warning
    assert [each.getMessage() for each in caplog.records if each.levelno == logging.INFO] == [
        f"serving {folder} from now on" for folder in folders[2:]
    ]


def test_a_run_that_goes_on_from_an_older_checkpoint_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Back from step 8 to 5, and to a step 8 that was written again."""
    checkpoints, loaded = tmp_path / "run" / "checkpoints", list[str]()

    def complete(step: int) -> None:
        (checkpoints / f"global_step_{step}").mkdir(parents=True)
        (checkpoints / f"global_step_{step}" / server.checkpoint.MANIFEST).write_text("{}")

    monkeypatch.setattr(server, "FOLLOW_SECONDS", 0.01)
    monkeypatch.setattr(server._Server, "_load", lambda self, source: loaded.append(source.name))
    complete(8)
    following = server._Server.__new__(server._Server)
    following._settings = replace(SETTINGS, follow=True, model=str(tmp_path / "run"))
    following._source = str(checkpoints / "global_step_8")

    async def follow() -> None:
        task = asyncio.create_task(following._follow())
        await asyncio.sleep(0.1)
        (checkpoints / "global_step_8").rename(checkpoints / "global_step_8.left_behind")
        for number, step in enumerate((5, 8), start=1):
            complete(step)
            while len(loaded) < number:
                await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(asyncio.wait_for(follow(), 20))
    assert loaded == ["global_step_5", "global_step_8"]


class Telling:
    """An engine that knows the log-probs of prompts, and samples the token 7."""

    def __init__(self) -> None:
        self.waiting = list[Request]()

    def prompt_log_probs(self, prompt: Sequence[int], count: int) -> Any:
        likeliest = [[(token, -1.0 - token) for token in range(count)] for _ in prompt[1:]]
        return [-9.0] * (len(prompt) - 1), likeliest

    def submit(self, request: Request) -> bool:
        self.waiting.append(request)
        return True

    def poll(self, timeout_seconds: float) -> list[Finished]:
        done, self.waiting = self.waiting, []
        return [Finished(each.uid, each.attempt, Completion((7,), (0.0,), "length", ())) for each in done]

    def abort(self, uids: set[str]) -> None:
        pass

    def status(self) -> Status:
        return Status(version=0, running=0, waiting=0)

    def close(self) -> None:
        pass


def test_the_table_of_a_prompt_is_made_beside_the_event_loop(
    qwen25_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is decoded once, in a thread of readers; a response that would be too large is refused."""
    tokenizer, decoded = load_tokenizer(qwen25_folder), list[tuple[int, str]]()
    reader = BodyReader("m", tokenizer, stop_token_ids(qwen25_folder, tokenizer), 512, 512, 100)
    thread = EngineThread(Telling(), on_death=lambda error: None)  # type: ignore[arg-type]
    made = App(reader, thread, SETTINGS, dict)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        thread.run_elsewhere = asyncio.get_running_loop().call_soon_threadsafe
        yield

    made.asgi.router.lifespan_context = lifespan
    kept = tokenizer.decode

    def decode(ids: Sequence[int], *args: Any, **options: Any) -> Any:
        decoded.append((len(ids), threading.current_thread().name))
        return kept(ids, *args, **options)

    monkeypatch.setattr(tokenizer, "decode", decode)
    body = {"model": "m", "prompt": [[3, 1, 9, 2], [5, 6]], "max_tokens": 1, "prompt_logprobs": 3}
    with TestClient(made.asgi, base_url="http://127.0.0.1") as client:
        first, second = client.post("/v1/completions", json=body).json()["choices"]
        threads = {name for size, name in decoded if name.startswith("prompts")}
        assert sum(name in threads for _, name in decoded) == 5 and len(threads) <= app.READING_THREADS  # 0, 1, 2, 9, 6
        assert first["prompt_logprobs"][0] is None and len(first["prompt_logprobs"]) == 4
        assert second["prompt_logprobs"][1] == {
            str(token): {"logprob": value, "decoded_token": kept([token])}
            for token, value in {6: -9.0, 0: -1.0, 1: -2.0, 2: -3.0}.items()
        }
        assert first["text"] == kept([7]) and (first["index"], second["index"]) == (0, 1)
        monkeypatch.setattr(app, "MOST_PROMPT_SCORES", 47)  # 6 tokens, 4 log-probs each, for 2 samples
        refused = client.post("/v1/completions", json={**body, "n": 2})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    thread.stop()
