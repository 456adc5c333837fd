# SPDX-License-Identifier: Apache-2.0
"""States of models: checkpoints of another base, gradients across a load or a failure, errors of ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.plugins.serving.tinker.rows import answer, body, datum, part, request
from tests.raising import raises
from whet import serialization
from whet.devices import HOST
from whet.engines.engine import Engine
from whet.errors import DataError, EngineError, WhetError
from whet.plugins.lessons.init_model import init_model
from whet.plugins.serving.tinker.models import Models
from whet.plugins.serving.tinker.store import WHOLE, ModelKind, Saved, Store
from whet.plugins.serving.tinker.training import Base, TrainingRank
from whet.plugins.serving.tinker.wire import LossRequest

KIND, ADAM = ModelKind("nano", 2), {"learning_rate": 1e-2}
ROWS = [datum([1, 2], target_tokens=[2, 3], weights=np.float32([1, 1])) for _ in range(3)]
SAMPLER, STATE = "tinker://m/sampler_weights/s", "tinker://m/weights/w"


@pytest.fixture
def models(model_folder: Path, tmp_path: Path) -> Models:
    made = Models(Base(str(model_folder)), "nano", "float32", Store(tmp_path), 512, HOST)
    made.create("m", KIND)
    return made


def train(models: Models, data: list[bytes] = ROWS, loss: str = "cross_entropy") -> None:
    *_, reply = models.loss(request("m", data, loss))
    assert reply is not None and answer(reply)


def saved(models: Models, path: str, **fields: Any) -> None:
    models.save("m", path, Saved("me", KIND, 1.0, **fields), overwrite=False)


def test_a_checkpoint_of_another_base_is_refused_each_time(models: Models, tmp_path: Path) -> None:
    """The other base has other weights in the same shapes, and even the same name."""
    train(models)
    models.step("m", ADAM)
    for path in (SAMPLER, STATE):
        saved(models, path)
    folder = init_model(tmp_path / "nano", "qwen3", "nano", num_layers=2, seed=7)
    other = Models(Base(str(folder)), "nano", "float32", models.store, 512, HOST)
    for _ in range(2):
        with raises(EngineError, SAMPLER):
            other.module("me", SAMPLER)
        with raises(EngineError, STATE):
            other.load("me", "n", STATE, optimizer=True)
    assert not other._sampled and not other.here.engines
    renamed = Models(models.here._base, "other-name", "float32", models.store, 512, HOST)
    assert renamed.module("me", SAMPLER) is not renamed.base  # the weights count, the name does not


def test_weights_that_do_not_fit_are_never_served(models: Models) -> None:
    saved(models, SAMPLER)
    file = models.store.find("me", SAMPLER)[0] / WHOLE
    serialization.save(file, {"some": torch.zeros(1)})
    for _ in range(2):
        with raises(EngineError, SAMPLER):
            models.module("me", SAMPLER)
    with raises(EngineError):  # it has no state to train from
        models.load("me", "n", SAMPLER, optimizer=True)
    assert models.here.engines.keys() == {"m"}


def test_a_load_drops_the_gradient_before_it(models: Models) -> None:
    saved(models, STATE)
    train(models)
    models.load("me", "m", STATE, optimizer=True)
    assert "empty_updates" in models.step("m", ADAM)
    train(models)
    alone = models.step("m", ADAM)["grad_norm"]
    models.load("me", "m", STATE, optimizer=True)
    train(models)
    assert models.step("m", ADAM)["grad_norm"] == alone


def test_a_request_that_fails_between_its_parts_leaves_no_gradient(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.here.engines["m"].max_tokens_per_micro_batch = 3  # a row in each pass
    done, one_pass = list[int](), Engine.forward_backward

    def fails(engine: Engine, *asked: Any) -> Any:
        done.append(1)
        if len(done) == 3:
            raise RuntimeError("no memory")
        return one_pass(engine, *asked)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(Engine, "forward_backward", fails)
        train(models)
    assert len(done) == 3 and "empty_updates" in models.step("m", ADAM)
    train(models)
    with pytest.raises(DataError):  # refused before its first part: the gradient of others stays
        train(models, [])
    assert "grad_norm" in models.step("m", ADAM)


def test_a_rank_returns_the_errors_of_requests(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is raised would end the ranks, and the server with them."""
    rank: Any = SimpleNamespace(_training=models.here)
    policy = {"target_tokens": [2, 3], "logprobs": np.float32([-1, -2]), "advantages": np.float32([1, 1])}
    text = part(7, part(1, b"clip_low_threshold") + part(2, part(2, b"abc")))
    for asked in (
        LossRequest(body("m", [datum([1, 2], **policy)], "ppo") + text),
        request("m", [datum([1, 2], row=np.float32([1, 2]), **policy)], "ppo"),
        request("unknown", [datum([1, 2], **policy)], "ppo"),
    ):
        assert isinstance(TrainingRank.do(rank, "loss", (asked, models.vocab_size, 512)), WhetError)
    for params in ({"beta1": None}, {"eps": "small"}, {"grad_clip_norm": float("nan")}):
        assert isinstance(TrainingRank.do(rank, "step", ("m", params)), WhetError)

    def full(*_: Any) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(serialization, "save", full)
    assert isinstance(TrainingRank.do(rank, "save", ("m", models.store.folder, False)), OSError)
