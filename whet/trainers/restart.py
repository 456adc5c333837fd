# SPDX-License-Identifier: Apache-2.0
"""A run that goes on by itself after a worker, or the machine under it, was lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from whet.config.schema import SFTConfig, TrainConfig
from whet.errors import DeadlineError, LostWorkerError
from whet.trainers import checkpoint
from whet.trainers.frame import run_folder

log = logging.getLogger(__name__)
C = TypeVar("C", TrainConfig, SFTConfig)
R = TypeVar("R")


def with_restarts(config: C, attempt: Callable[[C], R]) -> R:
    """What `attempt` returns. Where it loses a worker it is called again, `trainer.max_restarts` times at the most,
    with a config that goes on from the newest checkpoint: as if the program had been killed and started again.

    Raises: what `attempt` raises, and LostWorkerError or DeadlineError once there are no restarts left."""
    for left in range(config.trainer.max_restarts - 1, -1, -1):
        try:
            return attempt(config)
        except (LostWorkerError, DeadlineError) as error:
            config = going_on(config)
            last = checkpoint.newest(run_folder(config.trainer))
            where = "afresh" if last is None else f"from {last}"
            log.warning("%s; starting again %s (%d more of trainer.max_restarts)", error, where, left)
    return attempt(config)


def going_on(config: C) -> C:
    """The config with which a broken-off run goes on in its folder, whatever it was resumed from itself."""
    resume, saved = config.trainer.resume, checkpoint.newest(run_folder(config.trainer))
    if resume not in ("auto", "never"):
        before = checkpoint.step_of(Path(resume).expanduser())
        if saved is None or checkpoint.step_of(saved) <= before:
            return config
    trainer = config.trainer.model_copy(update={"resume": "auto"})
    return config.model_copy(update={"trainer": trainer})
