# SPDX-License-Identifier: Apache-2.0
"""An engine alone behind `whet eval`, `generate` and `serve`: its server is killed, and all requests are answered."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import fake_server as fake
from fake_engines import Start, events_of, request, starting

from whet.config.schema import ModelConfig, RolloutConfig
from whet.errors import EngineError, LostReplicaError, WhetError
from whet.evaluation import evaluate
from whet.plugins.inference.vllm import engine as engine_module
from whet.plugins.inference.vllm.engine import VLLMEngine
from whet.plugins.serving.engine_thread import EngineThread
from whet.rollout.protocol import Completion, Event, Finished, Partial, generate
from whet.rollout.replicas import Restarted

FAKE = str(Path(__file__).with_name("fake_server.py"))


@pytest.fixture
def start(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts engines whose server is the fake one."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    fields = "max_model_len: int = 1\n    gpu_memory_utilization: float = 0.9\n    model: str = ''"
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(f"class EngineArgs:\n    {fields}\n")
    monkeypatch.setattr(
        "whet.plugins.inference.servers.engine.fitting", lambda weights, *_: weights
    )  # the server takes any
    with starting(VLLMEngine, engine_module, FAKE, tmp_path / "vllm", model_folder, monkeypatch) as start:
        yield start


def kill_later(engine: VLLMEngine, seconds: float = 0.4) -> None:
    process = engine.server.process
    threading.Timer(seconds, process.kill).start()


def tokens(count: int) -> tuple[int, ...]:
    return tuple(range(3, 3 + count))


@pytest.mark.slow
def test_all_requests_are_answered(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    engine = start(restarts=2)
    alone = Restarted(engine)
    for loss in range(2):
        made = [request(fake.SLOW, 20 + number, uid=f"{loss} {number}") for number in range(8)]
        generate(alone, [request(fake.QUICK)])  # the server runs
        kill_later(engine)
        assert [each.token_ids for each in generate(alone, made)] == [tokens(20 + number) for number in range(8)]
    assert sum(isinstance(record.args[0], LostReplicaError) for record in caplog.records if record.args) == 2
    kill_later(engine, 0.0)
    with raises(EngineError, key=re.compile("^vLLM server "), found=re.compile(" -9$")):
        generate(alone, [request(fake.SLOW, 99)])


@pytest.mark.slow
def test_weights_that_came_meanwhile_sample_the_rest(start: Start) -> None:
    import torch

    engine = start(restarts=1)
    alone = Restarted(engine)
    alone.load([("a", torch.ones(2))], 1)
    alone.submit(request(fake.SLOW, 30))
    assert alone.poll(0.2) == []  # the server has it
    engine.server.process.kill()
    engine.server.process.wait()
    alone.load([("a", torch.ones(2))], 2)
    [event] = events_of(alone)
    assert isinstance(event, Finished) and event.completion.versions == ((2, 30),)
    assert alone.status().version == 2


@pytest.mark.slow
def test_a_stream_goes_on_behind_the_tokens_that_were_told(start: Start) -> None:
    """`whet serve` shows a client each token once."""
    engine = start(restarts=1)
    thread, told, ended = (
        EngineThread(Restarted(engine), on_death=lambda error: None),
        list[Any](),
        Future[Completion](),
    )

    def deliver(event: Event | WhetError) -> None:
        if isinstance(event, Partial):
            told.append((event.offset, event.token_ids))
        elif isinstance(event, Finished):
            ended.set_result(event.completion)
        else:
            ended.set_exception(AssertionError(event))

    thread.submit([request(fake.SLOW, 60, streams=True)], deliver)
    while not told:
        time.sleep(0.01)
    kill_later(engine)
    assert ended.result(60).token_ids == tokens(60)
    place = 0
    for offset, chunk in told:
        assert offset == place
        place += len(chunk)
    assert place == 60 and sum((chunk for _, chunk in told), ()) == tokens(60)
    refused = Future[Event | WhetError]()
    thread.submit([request(fake.QUICK, 9999, uid="long")], refused.set_result)
    assert isinstance(refused.result(20), EngineError), "one that can never fit reaches its client"
    thread.stop()


@pytest.mark.slow
def test_an_aborted_request_ends_where_the_server_is_lost(start: Start) -> None:
    engine = start(restarts=1)
    alone = Restarted(engine)
    alone.submit(request(fake.SLOW, 40, uid="stays"))
    alone.submit(request(fake.STUCK, 40, uid="goes"))
    assert alone.poll(0.2) == []  # the server has them
    engine.server.process.kill()
    engine.server.process.wait()
    alone.abort(["goes"])
    found = {event.uid: event.completion for event in events_of(alone, 2) if isinstance(event, Finished)}
    assert found["goes"].finish_reason == "abort" and found["stays"].token_ids == tokens(40)


def test_the_commands_open_such_an_engine(start: Start, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    monkeypatch.setattr(evaluate, "rollout_engine", lambda *_: engine)
    opened = evaluate.open_engine(
        RolloutConfig(dtype="float32"), ModelConfig(path=str(model_folder)), str(model_folder)
    )
    assert isinstance(opened, Restarted) and opened.engine is engine
