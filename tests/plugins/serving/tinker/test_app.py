# SPDX-License-Identifier: Apache-2.0
"""The calls of the SDK against the application in this process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.plugins.serving.test_app import SETTINGS
from tests.plugins.serving.tinker.rows import body, datum, part
from whet import serialization
from whet.devices import HOST
from whet.plugins.serving.engine_thread import EngineThread
from whet.plugins.serving.server import reader_of
from whet.plugins.serving.tinker.app import Served, TinkerApp
from whet.plugins.serving.tinker.models import Models
from whet.plugins.serving.tinker.samplers import Samplers
from whet.plugins.serving.tinker.server import _engine
from whet.plugins.serving.tinker.store import Store
from whet.plugins.serving.tinker.training import Base

ROWS = [datum([1, 2], target_tokens=[2, 3], weights=np.float32([1, 1]))]
PROTO = {"content-type": "application/x-protobuf"}
Raw = dict[str, Any]


class Client:
    """Calls the server as the SDK does, and reads the results."""

    def __init__(self, app: TinkerApp, http: TestClient, folder: Path) -> None:
        self.app, self.http, self.folder = app, http, folder
        self.session = self.post("create_session")["session_id"]
        self.model = self.result(self.post("create_model", **self.asked(0)))["model_id"]
        self._seq = 0

    def asked(self, number: int, **lora: Any) -> Raw:
        own = {"rank": 2, **lora}
        return {"session_id": self.session, "model_seq_id": number, "base_model": "nano", "lora_config": own}

    def post(self, name: str, **raw: Any) -> Raw:
        reply: Raw = self.http.post(f"/api/v1/{name}", json=raw).json()
        return reply

    def result(self, promise: Raw) -> Raw:
        reply = self.http.post("/api/v1/retrieve_future", json={"request_id": promise["request_id"]})
        assert reply.status_code == 200, reply.text
        found: Raw = {} if reply.headers["content-type"] == PROTO["content-type"] else reply.json()
        return found

    def call(self, name: str, **raw: Any) -> Raw:
        """Runs a request of the model, the next one in order."""
        self._seq += 1
        return self.result(self.post(name, model_id=self.model, seq_id=self._seq, **raw))

    def loss(self, data: list[bytes], loss: str, options: Mapping[str, str] | None = None) -> Raw:
        self._seq += 1
        content = body(self.model, data, loss, seq=self._seq)
        for key, text in (options or {}).items():
            content += part(7, part(1, key.encode()) + part(2, part(2, text.encode())))
        reply = self.http.post("/api/v1/forward_backward", content=content, headers=PROTO)
        return self.result(reply.json())

    def saved(self) -> list[str]:
        """Lists the checkpoints by kind and name."""
        found = self.http.get("/api/v1/checkpoints").json()["checkpoints"]
        return ["/".join(each["tinker_path"].split("/")[-2:]) for each in found]

    def sample(self, sampler: str, number: int = 0) -> Raw:
        prompt = {"chunks": [{"tokens": [1, 2]}]}
        raw = {"prompt": prompt, "num_samples": 1, "sampling_params": {"max_tokens": 2}}
        return self.result(self.post("asample", sampling_session_id=sampler, seq_id=number, **raw))


@pytest.fixture(scope="module")
def base(model_folder: Path) -> Base:
    return Base(str(model_folder))


@pytest.fixture
def client(base: Base, tmp_path: Path) -> Iterator[Client]:
    settings = replace(SETTINGS, model=base.folder, name="nano", tinker=True, folder=str(tmp_path))
    reader, died = reader_of(settings, base.folder, "nano"), list[Exception]()
    models = Models(base, "nano", "float32", Store(tmp_path), 512, HOST)
    samplers = Samplers(_engine(settings, base.folder, "float32"), models.module)
    thread = EngineThread(samplers, on_death=died.append)  # type: ignore[arg-type]
    app = TinkerApp(Served(frozenset(), base.folder, "qwen3", reader), models, thread, samplers, settings)
    with TestClient(app.asgi, base_url="http://localhost", headers={"x-api-key": "tml-me"}) as http:
        yield Client(app, http, tmp_path)
    thread.stop()
    assert not died
    assert not [*tmp_path.glob("*/*/snapshot-*")] and not models.here.engines  # sessions have ended with the server


def test_a_client_runs_no_code(client: Client, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for loss, options in (
        ("timeit:timeit", {"setup": f"open({str(ran)!r}, 'w')"}),
        ("cross_entropy", {"aggregation": "timeit:timeit"}),
    ):
        assert client.loss(ROWS, loss, options)["category"] == "user" and not ran.exists()
    assert client.loss(ROWS, "cross_entropy") == {}


def test_snapshots_end_with_their_session_and_named_checkpoints_stay(client: Client) -> None:
    client.call("save_weights", path="_best")
    client.call("save_weights_for_sampler", path="_1")
    client.call("save_weights_for_sampler", sampling_session_seq_id=0)
    *named, snapshot = client.saved()
    assert named == ["weights/_best", "sampler_weights/_1"] and snapshot.startswith("sampler_weights/snapshot-")
    client.http.post(f"/api/v1/sessions/{client.session}/finish", json={})
    client.app._thread.call(lambda: None).result()
    assert client.saved() == named
    client.session = client.post("create_session")["session_id"]
    client.model = client.result(client.post("create_model", **client.asked(0)))["model_id"]
    client._seq = 0
    client.call("save_weights_for_sampler", sampling_session_seq_id=0)  # the end of the server removes it
    assert len(client.saved()) == 3


def test_a_retry_of_a_snapshot_has_the_first_sampler(client: Client) -> None:
    """The SDK counts its samplers up, also when it sends a request again."""
    asked = {"model_id": client.model, "seq_id": 1}
    first = client.post("save_weights_for_sampler", **asked, sampling_session_seq_id=0)
    assert client.post("save_weights_for_sampler", **asked, sampling_session_seq_id=1) == first
    sampler = client.result(first)["sampling_session_id"]
    assert sampler.endswith(":0") and client.sample(sampler) == {}
    assert client.http.get(f"/api/v1/samplers/{sampler[:-1]}1").status_code == 404
    other = {"session_id": client.session, "sampling_session_seq_id": 0, "base_model": "nano"}
    assert client.http.post("/api/v1/create_sampling_session", json=other).status_code == 422
    late = {"model_id": client.model, "seq_id": 0, "sampling_session_seq_id": 7}
    assert client.http.post("/api/v1/save_weights_for_sampler", json=late).status_code == 422
    assert client.http.get(f"/api/v1/samplers/{sampler[:-1]}7").status_code == 404  # it was not accepted


def test_a_step_with_a_gradient_that_is_not_finite_has_a_result(client: Client) -> None:
    endless = {"logprobs": np.float32([-1, -1]), "advantages": np.float32([np.inf, 1])}
    client.loss([datum([1, 2], target_tokens=[2, 3], **endless)], "importance_sampling")
    metrics = client.call("optim_step", adam_params={"learning_rate": 1e-3})["metrics"]
    assert metrics["skipped_updates"] == 1 and not math.isfinite(float(metrics["grad_norm"]))
    refused = client.call("optim_step", adam_params={"learning_rate": "high"})
    assert refused["category"] == "user" and "learning_rate" in refused["error"]


def test_a_save_that_fails_leaves_the_checkpoint_before(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    path = client.call("save_weights_for_sampler", path="best")["path"]
    with monkeypatch.context() as patch:

        def full(*_: Any) -> None:
            raise OSError(28, "full")

        patch.setattr(serialization, "save", full)
        assert client.call("save_weights_for_sampler", path="best", overwrite=True)["category"] == "server"
    assert client.saved() == ["sampler_weights/best"]
    asked = {"session_id": client.session, "sampling_session_seq_id": 0, "model_path": path}
    assert client.sample(client.post("create_sampling_session", **asked)["sampling_session_id"]) == {}


def test_a_checkpoint_whose_file_is_gone_fails_its_own_samples(client: Client) -> None:
    path = client.call("save_weights_for_sampler", path="x")["path"]
    asked = {"session_id": client.session, "model_path": path}
    gone = client.post("create_sampling_session", **asked, sampling_session_seq_id=0)["sampling_session_id"]
    [file] = client.folder.glob("*/sampler_weights/x/weights.safetensors")
    file.unlink()
    for number in range(2):
        assert client.sample(gone, number)["category"] == "user"
    whole = {"session_id": client.session, "sampling_session_seq_id": 1, "base_model": "nano"}
    assert client.sample(client.post("create_sampling_session", **whole)["sampling_session_id"]) == {}


def test_a_model_that_was_not_created_is_an_error_of_the_client(client: Client) -> None:
    nothing = client.asked(1, train_attn=False, train_mlp=False, train_unembed=False)
    failed = client.post("create_model", **nothing)
    assert client.result(failed)["category"] == "user"
    client.model, client._seq = failed["model_id"], 0
    assert client.loss(ROWS, "cross_entropy")["category"] == "user"
    assert client.call("save_weights", path="x")["category"] == "user"
    assert client.call("optim_step", adam_params={})["category"] == "user"


def test_a_time_to_live_that_no_clock_has_is_refused(client: Client) -> None:
    for bad in (0, -1, 1e300):
        asked = {"model_id": client.model, "seq_id": 1, "path": "x", "ttl_seconds": bad}
        assert client.http.post("/api/v1/save_weights", json=asked).status_code == 400
    client.call("save_weights", path="x", ttl_seconds=3600, user_metadata={"step": 3})
    assert client.saved() == ["weights/x"]
