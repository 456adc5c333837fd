# SPDX-License-Identifier: Apache-2.0
"""The first lines of a run and of its plan: models, data, steps, devices, estimated time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from whet.config.schema import SFTConfig
from whet.errors import ModelError
from whet.planning.machine import free_accelerator
from whet.planning.memory import Setup
from whet.planning.speed import measure, plan_speed
from whet.planning.units import count, duration, plural

log = logging.getLogger(__name__)
QUICK_SECONDS = 0.02  # to measure each rate at the start of a run


@dataclass(frozen=True)
class Counts:
    """Numbers of a run: prompts or examples for training and validation, steps."""

    train: int
    val: int
    steps: int
    first_step: int = 0  # steps that an earlier start of the run has done


def introduce(setup: Setup, counts: Counts) -> None:
    """Logs the first lines of a run."""
    setup = replace(setup, device=free_accelerator(setup.config.cluster))
    try:
        lines = [*model_lines(setup), data_line(setup, counts)]
        if setup.device is None:  # the speed of accelerators is not measured
            speed = plan_speed(setup, rates=measure(setup, QUICK_SECONDS), num_val=counts.val)
            seconds = speed.whole(setup.config.trainer, counts.steps, counts.first_step)
            longest = "" if isinstance(setup.config, SFTConfig) else " if all responses reach their length limit"
            lines.append(f"estimated total time: {duration(seconds)}{longest} (accurate to a factor of two)")
    except ModelError as error:  # loading the model will raise it again
        log.debug("no estimate: %s", error)
        return
    for line in lines:
        log.info("%s", line)


def model_lines(setup: Setup) -> Iterator[str]:
    """Yields a line for each model: size, trained fraction, dtype, processes and their device."""
    config = setup.config
    dtype = "float32" if config.model.dtype == "float32" else f"{config.model.dtype} over float32 weights"
    device = (
        f"the CPU with {plural(torch.get_num_threads(), 'thread')}" if setup.device is None else "one accelerator each"
    )
    for role, model in setup.outlines.items():
        share = model.trained_share if role in setup.objectives else 0.0
        trained = "not trained" if share == 0 else "all trained" if share == 1 else f"{share:.2%} trained"
        processes = plural(config.cluster.processes_of(role), "process", "processes")
        yield f"{role}: {count(model.num_weights)} parameters, {trained}, {dtype}, {processes} on {device}"


def data_line(setup: Setup, counts: Counts) -> str:
    """A line with the size of the data, and the steps."""
    config = setup.config
    what, each = ("examples", "") if isinstance(config, SFTConfig) else ("prompts", f" x {config.rollout.n} responses")
    held_out = f", {counts.val:,} to validate on" if counts.val else ""
    done = f", {counts.first_step} done" if counts.first_step else ""
    steps = f"{plural(counts.steps, 'step')} of {config.data.train_batch_size} {what}{each}{done}"
    return f"{counts.train:,} {what} to train on{held_out}; {steps}"
