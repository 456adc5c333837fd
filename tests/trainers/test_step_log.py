# SPDX-License-Identifier: Apache-2.0
"""Lines come in the order of the steps, each with its validation, wherever that was done."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from whet.errors import EngineError
from whet.metrics import Metrics
from whet.trainers.step_log import StepLog
from whet.trainers.stop import Stopped

SECONDS = 10.0


class Scene:
    """A run whose rollout is apart, unless told otherwise; step 3 has a checkpoint due."""

    def __init__(self, *, samples_apart: bool = True) -> None:
        self.validated: list[int] = []
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.began = threading.Event()
        self.run: Any = SimpleNamespace(
            samples_apart=samples_apart,
            config=SimpleNamespace(trainer=SimpleNamespace(save_freq=3)),
            is_due=lambda every: every == 3 and self.step == 3,
            log=lambda step, metrics: self.lines.append((step, metrics.reduce())),
        )
        self.step = 0

    def validate(self, run: Any, step: int) -> Metrics:
        self.validated.append(step)
        self.began.set()
        metrics = Metrics()
        metrics.mean("val/accuracy", step / 10)
        return metrics

    def log(self, steps: StepLog, step: int, *, is_validated: bool = True) -> None:
        self.step = step
        metrics = Metrics()
        metrics.mean("loss", step)
        steps.log(step, metrics, is_validated=is_validated)


def test_a_step_is_validated_while_the_next_one_trains() -> None:
    scene = Scene()
    with StepLog(scene.run, scene.validate) as steps:
        scene.log(steps, 1)
        assert scene.validated == [] and scene.lines == []
        with steps.beside():
            assert scene.began.wait(SECONDS)  # in this block, not before and not after it
            assert scene.lines == []
        assert scene.lines == [(1, {"loss": 1.0, "val/accuracy": 0.1})]
        scene.log(steps, 2, is_validated=False)
        with steps.beside():
            assert scene.validated == [1]
    assert scene.lines[1:] == [(2, {"loss": 2.0})]


@pytest.mark.parametrize(("samples_apart", "step"), [(False, 1), (True, 3)])
def test_who_samples_where_models_train_and_who_saves_validates_first(samples_apart: bool, step: int) -> None:
    scene = Scene(samples_apart=samples_apart)
    with StepLog(scene.run, scene.validate) as steps:
        scene.log(steps, step)
        assert scene.lines == [(step, {"loss": step, "val/accuracy": step / 10})]


def test_a_run_that_is_stopped_has_the_line_of_its_last_step() -> None:
    scene = Scene()
    with pytest.raises(Stopped), StepLog(scene.run, scene.validate) as steps:
        scene.log(steps, 1)
        raise Stopped("SIGTERM", 15)
    assert scene.lines == [(1, {"loss": 1.0, "val/accuracy": 0.1})]


def test_what_validation_raises_ends_the_step() -> None:
    scene = Scene()

    def fails(run: Any, step: int) -> Metrics:
        raise EngineError("the rollout is gone")

    with pytest.raises(EngineError, match="the rollout is gone"), StepLog(scene.run, fails) as steps:
        scene.log(steps, 1)
        with steps.beside():
            pass
    assert scene.lines == []
