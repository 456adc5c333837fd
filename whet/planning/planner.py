# SPDX-License-Identifier: Apache-2.0
"""The planner's interface to a run before it starts. The planner is a plugin; without it a run starts unplanned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.batch import Batch
from whet.config.schema import RunConfig
from whet.engines.protocol import Objective
from whet.engines.role import RoleSettings
from whet.planning.machine import FreeMemory
from whet.registry import PARTS
from whet.rollout.requirements import CacheRoom, Lengths

if TYPE_CHECKING:
    from whet.planning.doctor import Finding

log = logging.getLogger(__name__)
NOT_ESTIMATED = "memory, disk and time are not estimated", "put whet/plugins/planner back"


@dataclass(frozen=True, eq=False)
class Setup:
    """The setup of a run, for the planner: its config, roles, objectives and lengths."""

    config: RunConfig
    roles: Mapping[str, RoleSettings]  # roles with a model
    objectives: Mapping[str, Objective]  # of the trained roles
    lengths: Lengths
    passes: tuple[str, ...] = ()  # roles with a forward pass over the rows before the update, once for each pass
    device: FreeMemory | None = None  # the accelerator of each process; None on the host
    host: FreeMemory | None = None  # the memory of a node; None: the free memory of this machine
    media_share: float = 0.0  # share of the prompts' tokens that belong to images and videos


@dataclass(frozen=True)
class Counts:
    """Numbers of a run: prompts or examples for training and validation, and steps."""

    train: int
    val: int
    steps: int
    first_step: int = 0  # steps that an earlier start of the run has done
    likely: int | None = None  # step at which the run is expected to stop early


def _not_estimated(config: RunConfig) -> Iterator[Finding]:
    from whet.planning.doctor import Finding

    yield Finding("plan", *NOT_ESTIMATED)


@dataclass(frozen=True)
class Planner:
    """The functions of the planner that a run calls before it starts. The defaults are for a run without the plugin."""

    # Checks that a run fits into memory and onto the disk. `replan` makes the setup of a changed config; `freed` bytes
    # of the disk become free at the start.  Returns the bytes of a checkpoint; 0 if unknown.  Raises: ConfigError.
    check_fits: Callable[[Setup, Path, Callable[[Any], Setup], int], int] = lambda setup, run_dir, replan, freed: 0
    introduce: Callable[[Setup, Counts], None] = lambda *_: log.warning("%s; %s", *NOT_ESTIMATED)  # logs first lines
    # Returns a role's settings, with the micro-batch tokens that an accelerator's memory allows if they are unset.
    sized: Callable[[RoleSettings, Setup, str], RoleSettings] = lambda settings, setup, role: settings
    # Returns the memory for the KV cache on an accelerator; by default the cache has `KV_CACHE_BYTES`.
    cache_room: Callable[[Setup], CacheRoom | None] = lambda setup: CacheRoom(most=0)
    # Returns a function that counts the operations of a role's update on a batch; 0.0: unknown.
    update_flops: Callable[[RoleSettings], Callable[[Batch], float]] = lambda settings: lambda batch: 0.0
    findings: Callable[[RunConfig], Iterator[Finding]] = _not_estimated  # the lines of `whet doctor` about the run


def planner(*, is_needed: bool = False) -> Planner:
    """Returns the planner of runs.  Raises: RegistryError if `is_needed` and its plugin was deleted."""
    found: Planner = PARTS["planner"].load()() if is_needed or "planner" in PARTS else Planner()
    return found
