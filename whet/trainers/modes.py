# SPDX-License-Identifier: Apache-2.0
"""Whose the devices are where sampling and training take turns on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from whet.controller.worker_group import WorkerGroup
from whet.errors import WhetError


class Modes:
    """Switches the workers of all processes between training, in which they begin, and sampling.

    A context inside one of the same mode switches nothing. Without a rollout nothing ever does: the devices are large
    enough for both.
    """

    def __init__(self, rollout: WorkerGroup | None = None) -> None:
        self._rollout, self._samples = rollout, False

    def rollout_mode(self) -> AbstractContextManager[None]:
        """For as long as the block lasts, trained models and their optimizers are off the device."""
        return self._in(samples=True)

    def trainer_mode(self) -> AbstractContextManager[None]:
        """For as long as the block lasts, the rollout's cache and own weights are off the device."""
        return self._in(samples=False)

    @contextmanager
    def _in(self, *, samples: bool) -> Iterator[None]:
        before = self._samples
        self._switch(samples=samples)
        try:
            yield
        except WhetError:  # ends the run, and the workers may be closed
            raise
        except BaseException:
            self._switch(samples=before)
            raise
        self._switch(samples=before)

    def _switch(self, *, samples: bool) -> None:
        if self._rollout is None or samples == self._samples:
            return
        if samples:
            self._rollout.rollout_mode()
        else:
            self._rollout.trainer_mode()
        self._samples = samples
