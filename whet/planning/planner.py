# SPDX-License-Identifier: Apache-2.0
"""A run before it starts, and its planner: a plugin, without which a run starts without advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.batch import Batch
from whet.config.schema import RunConfig
from whet.engines.protocol import Objective
from whet.engines.role import RoleSettings
from whet.planning.machine import FreeMemory
from whet.registry import PLANNERS
from whet.rollout.planned import CacheRoom, Lengths

if TYPE_CHECKING:
    from whet.planning.doctor import Finding

NAME = "memory"  # of the planner that ships with whet


@dataclass(frozen=True, eq=False)
class Setup:
    """A config, with its roles, objectives and lengths."""

    config: RunConfig
    roles: Mapping[str, RoleSettings]  # roles with a model
    objectives: Mapping[str, Objective]  # of the trained roles
    lengths: Lengths
    passes: tuple[str, ...] = ()  # roles with a forward pass over the rows before the update, once for each pass
    device: FreeMemory | None = None  # the accelerator of each process; None on the host
    host: FreeMemory | None = None  # the memory of a node; None for what this machine has free
    media_share: float = 0.0  # of the tokens of prompts, those of images and videos


@dataclass(frozen=True)
class Counts:
    """Numbers of a run: prompts or examples for training and validation, steps."""

    train: int
    val: int
    steps: int
    first_step: int = 0  # steps that an earlier start of the run has done
    likely: int | None = None  # step at which the run is expected to stop early


class Planner:
    """The questions of a run before it starts, with the answers that it gets without the plugin."""

    def check_fits(self, setup: Setup, run_dir: Path, replan: Callable[[Any], Setup], reclaimed_bytes: int = 0) -> int:
        """Checks that a run fits into memory and onto the disk, where `reclaimed_bytes` become free at its start;
        `replan` makes the setup of another config.  Returns the bytes of a checkpoint; 0 where they are not estimated.

        Raises: ConfigError."""
        return 0

    def introduce(self, setup: Setup, counts: Counts) -> None:
        """Logs the first lines of a run: its models, its data, its likely time."""

    def sized(self, settings: RoleSettings, setup: Setup, role: str) -> RoleSettings:
        """The settings of a role, with the tokens of its micro-batches where an accelerator's memory decides. Without
        an answer they are those of the kind of device (`MICRO_BATCH_TOKENS`)."""
        return settings

    def cache_room(self, setup: Setup) -> CacheRoom | None:
        """The room for the cache of keys and values beside the other tensors of its process on an accelerator; None
        where its size follows from nothing there. Without an answer the cache has `KV_CACHE_BYTES`."""
        return CacheRoom(most=0)

    def update_flops(self, settings: RoleSettings) -> Callable[[Batch], float]:
        """The function that counts the operations of an update on a batch; 0.0 where they are not known."""
        return lambda batch: 0.0

    def findings(self, config: RunConfig) -> Iterator[Finding]:
        """Yields the lines of `whet doctor` about memory, disk and time of a run."""
        from whet.planning.doctor import Finding

        yield Finding("plan", "no memory, disk and time are estimated", "put whet/plugins/planner back")


def planner(*, is_needed: bool = False) -> Planner:
    """The planner of runs; where its plugin was deleted, one that gives no advice.

    Raises: RegistryError where it was deleted and `is_needed`."""
    found: Planner = PLANNERS[NAME].load()() if is_needed or NAME in PLANNERS else Planner()
    return found
