# SPDX-License-Identifier: Apache-2.0
"""Training runs in which a browser or a server of the shop is lost: only its episodes fail."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from whet_environments.browser import chromium
from whet_environments.webshop.catalogue import catalogue
from whet_environments.webshop.server import running

from tests.environments.test_browser import needs_chromium
from whet.config import TrainConfig, load_config
from whet.plugins.lessons.init_model import init_model
from whet.trainers.build import train

pytestmark = pytest.mark.slow
ALPHABET = "".join(map(chr, range(32, 127)))


def records(tmp_path: Path, *changes: str) -> list[dict[str, Any]]:
    """The metrics of two steps of a model with random weights, with two groups of four."""
    init_model(tmp_path / "model", size="nano", alphabet=ALPHABET, num_layers=1, max_position_embeddings=8192)
    rows = [{"prompt": ">", "seed": seed, "answer": ""} for seed in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [
        f"model.path={tmp_path}/model",
        "model.dtype=float32",
        f"data.train_files={tmp_path}/rows.jsonl",
        f"data.val_files={tmp_path}/rows.jsonl",
        "data.prompt_key=prompt",
        "data.apply_chat_template=false",
        "data.train_batch_size=2",
        "data.max_prompt_length=4000",
        "data.max_response_length=4000",
        "rollout.n=4",
        "environment.max_turns=3",
        "environment.max_turn_tokens=4",
        "actor.max_tokens_per_micro_batch=16384",
        "trainer.total_steps=2",
        "trainer.val_freq=0",
        "trainer.val_before_train=false",
        "trainer.save_freq=0",
        "trainer.logger=[jsonl]",
        f"trainer.run_dir={tmp_path}/run",
    ]
    train(load_config(TrainConfig, None, [*given, *changes]).config)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["step"]]


@contextmanager
def meanwhile(work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs some work in a thread until the block ends."""
    is_over = threading.Event()
    thread = threading.Thread(target=work, args=(is_over,))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@needs_chromium
def test_a_run_goes_on_after_a_browser_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="wb-", dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", None)
        killed: list[Path] = []

        def kill_one(is_over: threading.Event) -> None:
            while not is_over.is_set() and not killed:
                for folder in Path(name).glob(f"{chromium.PREFIX}*"):
                    processes = chromium.processes_of(folder)
                    if len(processes) > 1 and not killed:
                        time.sleep(0.5)
                        killed.append(folder)
                        for process in processes:
                            with suppress(ProcessLookupError):
                                os.kill(process, signal.SIGKILL)
                time.sleep(0.02)

        options = ["environment.name=whet_environments.browser.environment:Browser"]
        options += ["environment.options={num_products: 50, max_steps: 3, episodes_per_browser: 2}"]
        with meanwhile(kill_one):
            steps = records(tmp_path, *options)
        assert len(killed) == 1 and [record["step"] for record in steps] == [1, 2]
        failures = [record.get("failures/environment", 0) for record in steps]
        assert failures[1] == 0 and 1 <= failures[0] <= 2
        monkeypatch.undo()
        tempfile.tempdir = None


def test_a_run_goes_on_where_a_server_does_not_answer_at_times(tmp_path: Path) -> None:
    """A server in front of the shop's holds every fifth connection, and never answers it."""
    held: list[socket.socket] = []
    with running(catalogue(50, 0)) as address, socket.create_server(("127.0.0.1", 0)) as front:
        port = int(address.rpartition(":")[2])
        front.settimeout(0.1)

        def pass_on(is_over: threading.Event) -> None:
            number = 0
            while not is_over.is_set():
                with suppress(TimeoutError):
                    client, number = front.accept()[0], number + 1
                    if number % 5 == 0:
                        held.append(client)
                    else:
                        server = socket.create_connection(("127.0.0.1", port))
                        for one, other in ((client, server), (server, client)):
                            threading.Thread(target=copy, args=(one, other), daemon=True).start()

        options = ["environment.name=whet_environments.webshop.client:WebShopServer"]
        url = f"http://127.0.0.1:{front.getsockname()[1]}"
        options += [f"environment.options={{url: '{url}', request_seconds: 1.0, max_steps: 3}}"]
        with meanwhile(pass_on):
            steps = records(tmp_path, *options)
    for each in held:
        each.close()
    failures = [record.get("failures/environment", 0) for record in steps]
    assert [record["step"] for record in steps] == [1, 2] and 3 <= len(held) <= 5  # of 16 episodes
    assert 2 <= sum(failures) <= len(held)  # the end of a session may be held too


def copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while content := source.recv(65536):
            target.sendall(content)
    for each in (source, target):
        with suppress(OSError):
            each.close()
