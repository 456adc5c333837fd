# SPDX-License-Identifier: Apache-2.0
"""The schedule of a training loop: the points at which it may stop, validates, logs and saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Generic, Self, TypeVar

from whet.batch import Batch
from whet.errors import WhetError
from whet.metrics import Metrics
from whet.processes.background import Background
from whet.threads import Contention
from whet.trainers.frame import Frame
from whet.trainers.stop import Stopped

F = TypeVar("F", bound=Frame)


class Schedule(Generic[F]):
    """Runs the actions between the steps of a loop. `validate` returns the metrics of the held-out data after a step.

    If the rollout has its own processes, they are idle while models train, and still have the weights of the previous
    step. A validation is then delayed and runs during the next training, and the step's line in the log waits for it.
    If a checkpoint is due, nothing waits, because the checkpoint stores the validation's score."""

    def __init__(self, run: F, validate: Callable[[F, int], Metrics]) -> None:
        self._run, self._validate = run, validate
        self._held: tuple[int, Metrics] | None = None
        self._contention = Contention()

    def __enter__(self) -> Self:
        run = self._run
        if run.step == 0 and run.config.trainer.val_before_train and run.validates:
            with self.sampling():
                before = self._validate(run, 0)
            run.log(0, before)
        return self

    def sampling(self) -> AbstractContextManager[None]:
        """Marks the block at the start of a step that changes no weights. A stop request ends the run inside it."""
        return self._run.interruptible()

    def training(self) -> AbstractContextManager[None]:
        """Opens a `with` block of training, in which the rollout keeps its weights: a validation may run beside it."""
        return nullcontext() if self._held is None else self._beside(*self._held)

    @contextmanager
    def _beside(self, step: int, metrics: Metrics) -> Iterator[None]:
        thread = Background("validation")
        validated = thread.submit(partial(self._measured, step))
        thread.close()
        yield
        metrics.merge(validated.result())
        self._held = None
        self._run.log(step, metrics)

    def _measured(self, step: int) -> Metrics:
        """Validates. If the run is asked to end, the validation and its errors are left out, so that the run saves."""
        try:
            with self.sampling():
                return self._validate(self._run, step)
        except (Stopped, WhetError):
            if self._run.signals.asked is None:
                raise
        return Metrics()

    def end_step(self, batch: Batch, metrics: Metrics) -> None:
        """Counts the step. Then validates, logs, checks the run's health and saves, each if it is due."""
        run, trainer = self._run, self._run.config.trainer
        self._contention.end()
        run.step += 1
        run.total_steps = max(run.step, run.total_steps)  # a callback may end the run beside the step's training
        run.count_flops()
        is_saved = run.saves_now
        is_validated = run.validates and run.is_due(trainer.val_freq)
        if is_validated and run.samples_apart and not is_saved:
            self._held = run.step, metrics
        else:
            if is_validated:
                metrics.merge(self._measured(run.step))
            run.log(run.step, metrics)
        run.check_health(batch, metrics)
        if is_saved or run.is_due(0):  # a callback may have made this step the last
            run.save()
        self._contention.begin()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._contention.close()
        if isinstance(error, Stopped) and self._held is not None:  # so that a saved step also has a line in the log
            self._run.log(*self._held)
