# SPDX-License-Identifier: Apache-2.0
"""The lines of the steps: each after its validation, which may come while the next step trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from whet.metrics import Metrics
from whet.trainers.run import Run
from whet.trainers.stop import Stopped

Validate = Callable[[Run, int], Metrics]


class StepLog:
    """Logs the steps in their order.

    Where the rollout has processes of its own, these have nothing to do while models train, and still hold the weights
    of the step before: a validation waits until then, and with it the step's line. Not where a checkpoint is due too,
    which is to know how good it is.
    """

    def __init__(self, run: Run, validate: Validate) -> None:
        self._run, self._validate = run, validate
        self._held: tuple[int, Metrics] | None = None

    def log(self, step: int, metrics: Metrics, *, is_validated: bool) -> None:
        """Logs a step now, or holds it until `beside`."""
        run = self._run
        if is_validated and run.samples_apart and not run.is_due(run.config.trainer.save_freq):
            self._held = step, metrics
            return
        if is_validated:
            metrics.merge(self._validate(run, step))
        run.log(step, metrics)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Validates what is held while the block runs, and logs it after. The block must not change the weights that
        the rollout has."""
        if self._held is None:
            yield
            return
        step, metrics = self._held
        with ThreadPoolExecutor(1, "validation") as thread:
            validated = thread.submit(self._validate, self._run, step)
            yield
            metrics.merge(validated.result())
        self._held = None
        self._run.log(step, metrics)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Stopped):  # a step that is saved has its line
            with self.beside():
                pass
