# SPDX-License-Identifier: Apache-2.0
"""Ranks of one core each: in a module of their own, as worker processes import them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from whet.controller.worker import Placement
from whet.roles.workers import TrainWorker


class PinnedActor(TrainWorker):
    """An actor whose process has a core of its own; the other roles of the process share it."""

    def __init__(self, placement: Placement, *args: Any) -> None:
        pin(placement.rank)
        super().__init__(placement, *args)


def pin(rank: int) -> None:
    """Gives this process and its threads the core of that number, and torch one thread."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {cores[rank % len(cores)]})
    torch.set_num_threads(1)
