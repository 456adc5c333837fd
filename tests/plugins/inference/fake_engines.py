# SPDX-License-Identifier: Apache-2.0
"""Engines whose server is a script that answers without a model (fake_http.py), and requests for them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from whet.config.schema import LoraConfig, ModelConfig
from whet.plugins.inference.servers.engine import ServerEngine
from whet.plugins.inference.servers.environment import Interpreter
from whet.rollout.protocol import Event, Request, SamplingParams

CPU = torch.device("cpu")
Start = Callable[..., Any]


@contextmanager
def starting(
    kind: type[Any],
    module: ModuleType,
    fake: str,
    found: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    other: str | None = None,
) -> Iterator[Start]:
    """Yields a function that starts engines of the model in `folder`, and closes them at the end. Their server is the
    script `fake`, or another command; `found` looks like the server's package, `other` is its version, if not its own.
    """
    started: list[ServerEngine] = []
    environment = Interpreter(sys.executable, found, kind.package, other)
    monkeypatch.setattr("whet.plugins.inference.servers.engine.find_environment", lambda *_: environment)

    def start(script: Sequence[str] = (sys.executable, fake), batch: int = 64, **options: Any) -> Any:
        def line(python: str, port: int, arguments: Mapping[str, Any], **_: Any) -> list[str]:
            return [*script, str(port)]

        monkeypatch.setattr(module, "command", line)
        rank = 4 if options.get("adapter") else None
        model = ModelConfig(path=str(folder), lora=LoraConfig(rank=rank))
        options = {"start_seconds": 30.0, "answer_seconds": 20.0, **options}
        started.append(kind(torch.float32, batch, CPU, model, **options))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def request(kind: int, tokens: int = 5, uid: str = "0", **more: Any) -> Request:
    return Request(uid, (kind, 4), SamplingParams(tokens), key=1, **more)


def events_of(engine: ServerEngine, count: int = 1, seconds: float = 20.0) -> list[Event]:
    until, events = time.monotonic() + seconds, list[Event]()
    while len(events) < count:
        events += engine.poll(1.0)
        assert time.monotonic() < until
    return events
