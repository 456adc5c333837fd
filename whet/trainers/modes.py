# SPDX-License-Identifier: Apache-2.0
"""Hybrid mode: moves training state off the device while the rollout samples, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from whet.controller.worker_group import WorkerGroup
from whet.errors import WhetError


class Modes:
    """Switches the workers of all processes between training, in which they begin, and sampling. A context inside one
    of the same mode switches nothing; without a rollout none does: the devices are large enough for both."""

    def __init__(self, rollout: WorkerGroup | None = None) -> None:
        self._rollout, self._samples = rollout, False

    @contextmanager
    def rollout_mode(self, *, samples: bool = True) -> Iterator[None]:
        """Opens a block in which trained models and their optimizers are off the device; else `trainer_mode`."""
        before = self._samples
        self._switch(samples)
        try:
            yield
        except WhetError:  # ends the run, and the workers may be closed
            raise
        except BaseException:
            self._switch(before)
            raise
        self._switch(before)

    def trainer_mode(self) -> AbstractContextManager[None]:
        """Opens a block in which the rollout's cache and own weights are off the device."""
        return self.rollout_mode(samples=False)

    def _switch(self, samples: bool) -> None:
        if self._rollout is not None and samples != self._samples:
            (self._rollout.rollout_mode if samples else self._rollout.trainer_mode)()
            self._samples = samples
