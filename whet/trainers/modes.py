# SPDX-License-Identifier: Apache-2.0
"""Hybrid mode: moves training state off the device while the rollout samples, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from whet.controller.worker_group import WorkerGroup
from whet.errors import WhetError


class Modes:
    """Switches the workers of all processes from training, in which they begin, to sampling and back."""

    def __init__(self, rollout: WorkerGroup) -> None:
        self._rollout, self._samples = rollout, False

    @contextmanager
    def rollout_mode(self) -> Iterator[None]:
        """Opens a block in which trained models and their optimizers are off the device; one inside it changes nothing.
        After it the rollout's cache and own weights are off the device."""
        if self._samples:
            yield
            return
        self._rollout.rollout_mode()
        self._samples = True
        try:
            yield
        except WhetError:  # ends the run, and the workers may be closed
            raise
        except BaseException:
            self._back()
            raise
        self._back()

    def _back(self) -> None:
        self._rollout.trainer_mode()
        self._samples = False
