# SPDX-License-Identifier: Apache-2.0
"""A run that goes on by itself after a worker, or the machine under it, was lost."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from whet.checkpoints import checkpoint
from whet.config.schema import SFTConfig, TrainConfig
from whet.errors import DeadlineError, LostWorkerError
from whet.trainers.frame import run_folder

log = logging.getLogger(__name__)
C = TypeVar("C", TrainConfig, SFTConfig)
R = TypeVar("R")


def with_restarts(config: C, attempt: Callable[[C], R]) -> R:
    """Returns what `attempt` does. Where it loses a worker it is called again, `trainer.max_restarts` times at most,
    as if the program had been killed and started again: it goes on from the newest checkpoint.

    Raises: what `attempt` raises, and LostWorkerError or DeadlineError once there are no restarts left."""
    folder = Path.cwd()
    for left in range(config.trainer.max_restarts - 1, -1, -1):
        try:
            return attempt(config)
        except (LostWorkerError, DeadlineError) as error:
            os.chdir(folder)  # user code may have left it
            if config.trainer.resume == "never":  # the folder is this run's own by now
                config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"resume": "auto"})})
            last = checkpoint.newest(run_folder(config.trainer))
            where = "afresh" if last is None else f"from {last}"
            log.warning("%s; starting again %s (%d more of trainer.max_restarts)", error, where, left)
    return attempt(config)
