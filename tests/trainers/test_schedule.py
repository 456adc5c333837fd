# SPDX-License-Identifier: Apache-2.0
"""Lines come in the order of the steps, each with its validation, wherever that was done."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.raising import raises
from whet.batch import Batch
from whet.errors import EngineError
from whet.metrics import Metrics
from whet.trainers.schedule import Schedule
from whet.trainers.stop import Stopped

SECONDS = 10.0


class Scene:
    """A run with a separate rollout, unless set otherwise; step 3 has a checkpoint due."""

    def __init__(self, *, samples_apart: bool = True) -> None:
        self.validated: list[int] = []
        self.saved: list[int] = []
        self.lines: list[tuple[int, dict[str, float]]] = []
        self.began = threading.Event()
        self.is_due = True
        self.run: Any = SimpleNamespace(
            samples_apart=samples_apart,
            validates=True,
            step=0,
            total_steps=9,
            signals=SimpleNamespace(asked=None),
            interruptible=self.interruptible,
            config=SimpleNamespace(trainer=SimpleNamespace(val_freq=1, val_before_train=False)),
            is_due=lambda every: self.is_due if every == 1 else False,
            log=lambda step, metrics: self.lines.append((step, metrics.reduce())),
            check_health=lambda batch, metrics: None,
            count_flops=lambda: None,
            save=lambda: self.saved.append(self.run.step),
        )

    def interruptible(self) -> AbstractContextManager[None]:
        if self.run.signals.asked is not None:
            raise self.run.signals.asked
        return nullcontext()

    def validate(self, run: Any, step: int) -> Metrics:
        self.validated.append(step)
        self.began.set()
        metrics = Metrics()
        metrics.mean("val/accuracy", step / 10)
        return metrics

    def end(self, schedule: Schedule[Any], step: int, *, is_validated: bool = True) -> None:
        self.run.step, self.is_due, self.run.saves_now = step - 1, is_validated, step == 3
        metrics = Metrics()
        metrics.mean("loss", step)
        schedule.end_step(Batch.of(), metrics)


def test_a_step_is_validated_while_the_next_one_trains() -> None:
    scene = Scene()
    with Schedule(scene.run, scene.validate) as schedule:
        scene.end(schedule, 1)
        assert scene.validated == [] and scene.lines == []
        with schedule.training():
            assert scene.began.wait(SECONDS)  # in this block, not before and not after it
            assert scene.lines == []
        assert scene.lines == [(1, {"loss": 1.0, "val/accuracy": 0.1})]
        scene.end(schedule, 2, is_validated=False)
        with schedule.training():
            assert scene.validated == [1]
    assert scene.lines[1:] == [(2, {"loss": 2.0})]


@pytest.mark.parametrize(("samples_apart", "step"), [(False, 1), (True, 3)])
def test_who_samples_where_models_train_and_who_saves_validates_first(samples_apart: bool, step: int) -> None:
    scene = Scene(samples_apart=samples_apart)
    with Schedule(scene.run, scene.validate) as schedule:
        scene.end(schedule, step)
        assert scene.lines == [(step, {"loss": step, "val/accuracy": step / 10})]


def test_a_run_that_is_stopped_has_the_line_of_its_last_step_and_does_not_validate() -> None:
    scene = Scene()
    with pytest.raises(Stopped), Schedule(scene.run, scene.validate) as schedule:
        scene.end(schedule, 1)
        raise Stopped("SIGTERM", 15)
    assert (scene.lines, scene.validated) == ([(1, {"loss": 1.0})], [])


@pytest.mark.parametrize("error", [None, EngineError("rollout", "gone"), Stopped("SIGTERM", 15)])
def test_a_stop_beside_a_validation_leaves_it_out_with_its_errors(error: BaseException | None) -> None:
    """A stop comes before the validation of step 1, or during it. Step 2, whose training has begun, is done."""
    scene = Scene()

    def validate(run: Any, step: int) -> Metrics:
        run.signals.asked = Stopped("SIGTERM", 15)
        assert error is not None
        raise error

    with pytest.raises(Stopped), Schedule(scene.run, validate) as schedule:
        scene.end(schedule, 1)
        scene.run.signals.asked = Stopped("SIGTERM", 15) if error is None else None
        with schedule.training():
            pass
        scene.end(schedule, 2)
        with schedule.sampling():
            raise AssertionError("not stopped")
    assert scene.lines == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]


def test_a_stop_beside_a_step_that_saves_leaves_its_validation_out() -> None:
    scene = Scene()
    scene.run.signals.asked = Stopped("SIGTERM", 15)
    with Schedule(scene.run, scene.validate) as schedule:
        scene.end(schedule, 3)
    assert (scene.lines, scene.validated, scene.saved) == ([(3, {"loss": 3.0})], [], [3])


def test_a_second_signal_waits_for_no_validation() -> None:
    scene, ends = Scene(), threading.Event()

    def validate(run: Any, step: int) -> Metrics:
        assert ends.wait(SECONDS)
        return Metrics()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Schedule(scene.run, validate) as schedule:
        scene.end(schedule, 1)
        with schedule.training():
            raise KeyboardInterrupt
    assert time.monotonic() - began < SECONDS / 2
    ends.set()


def test_a_callback_that_ends_the_run_beside_a_training_makes_this_step_the_last() -> None:
    scene = Scene()

    def log(step: int, metrics: Metrics) -> None:
        scene.lines.append((step, metrics.reduce()))
        if step == 1:
            scene.run.total_steps = scene.run.step  # as `Frame.stop` does

    scene.run.log = log
    scene.run.is_due = lambda every: scene.run.step == scene.run.total_steps or every == 1
    with Schedule(scene.run, scene.validate) as schedule:
        scene.end(schedule, 1)
        with schedule.training():
            pass
        scene.end(schedule, 2)
    assert (scene.run.step, scene.run.total_steps, scene.saved) == (2, 2, [2])


def test_what_validation_raises_ends_the_step() -> None:
    scene = Scene()

    def fails(run: Any, step: int) -> Metrics:
        raise EngineError("rollout", "lost")

    with raises(EngineError, "rollout", found="lost"), Schedule(scene.run, fails) as schedule:
        scene.end(schedule, 1)
        with schedule.training():
            pass
    assert scene.lines == []
