# SPDX-License-Identifier: Apache-2.0
"""What runs on the far side of a call: a worker, one a role and process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from whet.devices import HOST


@dataclass(frozen=True)
class Placement:
    """Where a worker finds itself: its backend makes one for it, and it is the first argument of its class."""

    role: str
    rank: int = 0
    world_size: int = 1
    process_group: torch.distributed.ProcessGroup | None = None
    neighbours: Mapping[str, Worker] = field(default_factory=dict)
    address: str = "127.0.0.1"
    device: torch.device = HOST


class Worker:
    """One rank of one role. Subclasses call `super().__init__(placement)` first and mark what the loop may call with
    `@register`. Arguments are to be read, not written: within one process they are the caller's own objects.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    @property
    def role(self) -> str:
        """What the group of this worker is called: actor, critic, rollout, ..."""
        return self._placement.role

    @property
    def rank(self) -> int:
        """The number of this worker's process, from 0."""
        return self._placement.rank

    @property
    def world_size(self) -> int:
        """How many ranks the role has."""
        return self._placement.world_size

    @property
    def process_group(self) -> torch.distributed.ProcessGroup | None:
        """The ranks as torch.distributed knows them; None where the process is alone."""
        return self._placement.process_group

    @property
    def neighbours(self) -> Mapping[str, Worker]:
        """The workers of other roles in this process, by role; in `__init__` those that were built before this one.
        A rollout worker takes the actor's module from here, without a copy."""
        return self._placement.neighbours

    @property
    def address(self) -> str:
        """Under which workers of other pools and nodes reach this machine: for stores and sockets of their own."""
        return self._placement.address

    @property
    def device(self) -> torch.device:
        """The device that the roles of this process share."""
        return self._placement.device

    @property
    def dp_rank(self) -> int:
        """Which shard of a batch this worker is given. Ranks that share a model (tensor parallel) report the same."""
        return self.rank

    @property
    def dp_size(self) -> int:
        """Into how many shards a batch is split; the same on every rank."""
        return self.world_size

    @property
    def is_reporting(self) -> bool:
        """Whether results come from this rank: true on exactly one of those with the same `dp_rank`."""
        return True

    def close(self) -> None:
        """Lets go of what would outlive the worker: files, processes. Called once, in an orderly end only."""


@dataclass(frozen=True)
class WorkerSpec:
    """How to build the workers of a role: `cls(placement, *args, **kwargs)` on every rank. Travels by pickle, so the
    class stands in a module that other processes can import."""

    role: str
    cls: type[Worker]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def build(self, placement: Placement) -> Worker:
        """The worker of one rank."""
        return self.cls(placement, *self.args, **self.kwargs)


@dataclass(frozen=True)
class Layout:
    """What a worker reports of its place among the data-parallel ranks."""

    dp_rank: int
    dp_size: int
    is_reporting: bool

    @classmethod
    def of(cls, worker: Worker) -> Layout:
        """The layout of one worker, read once after it was built."""
        return cls(worker.dp_rank, worker.dp_size, worker.is_reporting)
