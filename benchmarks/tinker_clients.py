# SPDX-License-Identifier: Apache-2.0
"""Eight clients of `whet serve --tinker` at once: rate, memory, and whether hostile ones change a number of theirs."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.setting import Setting
from whet.plugins.lessons.init_model import init_model
from whet.plugins.serving.tinker.wire import CLASSES

TITLE = "Clients of a training server"
NOTE = """\
`whet serve MODEL --tinker --dtype float32`, and clients that train an adapter of rank 16 each on 16 rows of 64 tokens a
step, by plain HTTP. Memory is what is resident in the server. Beside eight clients then come three that mean no good:
one sends what cannot be read, one asks for long work and never reads a result, one asks for work and dies.
`python -m benchmarks tinker_clients` measures it; by tests/plugins/serving/tinker/test_clients.py no number changes.
"""
CLIENTS, STEPS, ROWS, LENGTH = 8, 6, 16, 64
PROTO, KEY = {"content-type": "application/x-protobuf"}, {"x-api-key": "tml-any"}
ALONE = httpx.Limits(max_keepalive_connections=0)  # on a busy machine the server may close one as it is used


def run(setting: Setting) -> dict[str, Any]:
    """The numbers of `measure`."""
    model = init_model(setting.scratch / "served", "qwen3", setting.scale.size, num_layers=setting.scale.num_layers)
    return measure(model, setting.scratch, STEPS if setting.scale.is_thorough else 2)


def measure(model: Path, folder: Path, steps: int) -> dict[str, Any]:
    """Trains with one client, with eight, and with eight beside hostile ones.  Returns rates, memory in MiB, and
    whether all clients of one seed had the same losses."""
    words = [sys.executable, "-m", "whet", "serve", str(model), "--tinker", "--port", "0", "--dtype", "float32"]
    words += ["--name", "served", "--folder", str(folder / "checkpoints")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            address = next(at[1] for line in process.stdout if (at := re.search(r"on (http://\S+)", line)))
            threading.Thread(target=process.stdout.read, daemon=True).start()
            found: dict[str, Any] = {"rates": {}, "memory": {"0": _resident(process.pid)}}
            losses = list[list[float]]()
            for name, count in (("1", 1), (str(CLIENTS), CLIENTS), ("hostile", CLIENTS)):
                with _hostile(address) if name == "hostile" else nullcontext():
                    start = time.monotonic()
                    with ThreadPoolExecutor(count) as pool:
                        losses += pool.map(lambda _: _train(address, steps), range(count))
                    found["rates"][name] = count * steps * ROWS * LENGTH / (time.monotonic() - start)
                    found["memory"][name] = _resident(process.pid)
            return {**found, "is_equal": all(each == losses[0] for each in losses), "losses": losses[0]}
        finally:
            process.kill()


def report(results: Mapping[str, Any]) -> list[str]:
    """Rate and memory by clients."""
    found = results["tinker_clients"]
    names = {"0": "none", "1": "1", str(CLIENTS): str(CLIENTS), "hostile": f"{CLIENTS}, beside 3 hostile ones"}
    lines = ["| clients | tokens a second, all together | memory, MiB |", "|--:|--:|--:|"]
    for name, words in names.items():
        rate = f"{found['rates'][name]:,.0f}" if name in found["rates"] else ""
        lines.append(f"| {words} | {rate} | {found['memory'][name]:,.0f} |")
    same = "the same, bit for bit" if found["is_equal"] else "NOT the same"
    return [*lines, "", f"The losses of all these clients, which have one seed and the same rows, are {same}."]


class Client:
    """A session with a model."""

    def __init__(self, address: str) -> None:
        self.http = httpx.Client(base_url=f"{address}/api/v1/", headers=KEY, timeout=600, limits=ALONE)
        self.session = self.call("create_session")["session_id"]
        lora = {"rank": 16, "seed": 1, "train_unembed": False}
        model = {"session_id": self.session, "model_seq_id": 0, "base_model": "served", "lora_config": lora}
        self.model, self.seq = self.result(self.call("create_model", **model)).json()["model_id"], 0

    def call(self, path: str, **body: Any) -> dict[str, Any]:
        """The reply to JSON."""
        found: dict[str, Any] = self.http.post(path, json=body).raise_for_status().json()
        return found

    def result(self, promise: dict[str, Any]) -> httpx.Response:
        """The result of a request."""
        while "try_again" in (reply := self.http.post("retrieve_future", json=promise)).text[:100]:
            self.call("session_heartbeat", session_id=self.session)
        return reply.raise_for_status()

    def ask(self, rows: int, step: int) -> dict[str, Any]:
        """Asks for a loss of rows, and its gradient."""
        self.seq += 1
        body = CLASSES["ForwardBackwardRequest"](model_id=self.model, seq_id=self.seq, loss_fn="cross_entropy")
        for ids in np.random.default_rng(step).integers(1, 200, (rows, LENGTH + 1)):
            datum = body.data.add()
            datum.model_input.add().encoded_text.tokens = ids[:-1].astype("<i4").tobytes()
            target = datum.loss_fn_inputs.add(key="target_tokens").value
            target.dense, target.dtype = ids[1:].astype("<i8").tobytes(), 2
        reply = self.http.post("forward_backward", content=body.SerializeToString(), headers=PROTO)
        promise: dict[str, Any] = reply.raise_for_status().json()
        return promise

    def step(self) -> None:
        """A step of the optimizer."""
        self.seq += 1
        asked = {"model_id": self.model, "seq_id": self.seq, "adam_params": {"learning_rate": 1e-3}}
        self.result(self.call("optim_step", **asked))


def _train(address: str, steps: int) -> list[float]:
    client, losses = Client(address), list[float]()
    for step in range(steps):
        found = CLASSES["ForwardBackwardOutput"].FromString(client.result(client.ask(ROWS, step)).content)
        losses += [each.value for each in found.metrics]
        client.step()
    client.call(f"sessions/{client.session}/finish")
    return losses


@contextmanager
def _hostile(address: str) -> Iterator[None]:
    """Clients that mean no good, for as long as the block lasts."""
    over = threading.Event()

    def send_what_cannot_be_read() -> None:
        client = Client(address)
        bodies = b"\xff" * 1000, b"\x1a\x00" * 2_000_000, b"", client.model.encode()
        while not over.is_set():
            for body in bodies:
                client.http.post("forward_backward", content=body, headers=PROTO)
            client.http.post("asample", json={"sampling_session_id": client.model, "num_samples": -1})
            client.http.post("retrieve_future", json={"request_id": "another:1"})

    long, dying = Client(address), Client(address)
    for _ in range(4):
        long.ask(256, 0)
        dying.ask(ROWS, 0)
    dying.http.close()
    thread = threading.Thread(target=send_what_cannot_be_read)
    thread.start()
    yield
    over.set()
    thread.join()


def _resident(pid: int) -> float:
    """Memory of a process, in MiB."""
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) / 1024
