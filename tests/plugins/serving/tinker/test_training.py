# SPDX-License-Identifier: Apache-2.0
"""Models that several processes train: the numbers of one process."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.plugins.serving.tinker.rows import answer, datum, request
from whet.devices import HOST
from whet.errors import DataError
from whet.plugins.serving.tinker.models import Models
from whet.plugins.serving.tinker.store import ModelKind, Saved, Store
from whet.plugins.serving.tinker.training import Base, TrainingRanks

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01, "grad_clip_norm": 1.0}
KINDS = {
    "full": ModelKind("nano", 0),
    "lora": ModelKind("nano", 4, seed=3, train_unembed=True),
}
pytestmark = pytest.mark.slow
IMITATED = [
    datum([1, 2, 3], target_tokens=[2, 3, 4], weights=np.float32([0, 0.5, 0.25])),
    datum([5, 6], target_tokens=[6, 7], weights=np.float32([0.125, 0])),
    datum([9, 8, 7, 6], target_tokens=[8, 7, 6, 5], weights=np.float32([0, 0, 0, 0.125])),
]
SAMPLED = [
    datum([1, 2], target_tokens=[2, 3], logprobs=np.float32([0, -3]), advantages=np.float32([0, 2])),
    datum([4], target_tokens=[9], logprobs=np.float32([-2]), advantages=np.float32([-1])),
    datum([4], target_tokens=[8], logprobs=np.float32([-5]), advantages=np.float32([1])),
]
COMPARED = [
    datum([4, each], target_tokens=[each, 9], weights=np.float32([1, 1]), ref_log_probs=np.float32([-6, each - 7]))
    for each in (1, 2, 3, 5, 6, 7)  # three pairs, of which one rank has two
]
PICKED = [datum([1, 2, 3], target_tokens=[[2, 9], [3, 9], [4, 8]], weights=np.float32([[1, 0], [0, 2], [1, 1]]))]


def story(models: Models) -> list[np.ndarray]:
    """Losses, log-probs and norms of some steps of two models, which are saved and loaded, and samples' scores."""
    found = []
    for name, kind in KINDS.items():
        models.create(name, kind)
    for asked in ((IMITATED, "cross_entropy"), (SAMPLED, "ppo"), (COMPARED, "dpo"), (PICKED, "cross_entropy")):
        for name in KINDS:
            for is_forward in (True, False):
                *_, reply = models.loss(request(name, *asked, forward_only=is_forward))
                assert reply is not None
                rows, metrics = answer(reply)
                found += [np.concatenate([row.ravel() for row in rows]), np.array(metrics["loss:sum"])]
            with pytest.raises(DataError):
                list(models.loss(request(name, [datum([1], target_tokens=[10**6])], "cross_entropy")))
            found.append(np.array(models.step(name, ADAM)["grad_norm"]))
    for name, kind in KINDS.items():
        for part in ("weights", "sampler_weights"):
            models.save(name, f"tinker://{name}/{part}/one", Saved("me", kind, 1.0), overwrite=False)
        models.load("me", f"{name}2", f"tinker://{name}/weights/one", optimizer=True)
        for each in (name, f"{name}2"):
            *_, reply = models.loss(request(each, IMITATED, "cross_entropy"))
            found.append(np.array(models.step(each, ADAM)["grad_norm"]))
        scores = models.scores(models.module("me", f"tinker://{name}/sampler_weights/one"), (1, 2, 3), 0)
        assert scores.log_probs is not None and found[-1] == pytest.approx(found[-2], rel=1e-6)
        found.append(scores.log_probs[1:])
        models.drop(name)
    return found


@pytest.mark.parametrize("engine", ["fsdp", "single"])
def test_two_processes_have_the_numbers_of_one(model_folder: Path, tmp_path: Path, engine: str) -> None:
    base = Base(str(model_folder))
    alone = story(Models(base, "nano", "float32", Store(tmp_path / "one"), 512, HOST))
    with closing(TrainingRanks(base, 2)) as ranks:
        both = story(Models(base, "nano", "float32", Store(tmp_path / "two"), 512, HOST, engine, ranks))
    assert len(alone) == len(both)
    for one, two in zip(alone, both, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-5)
