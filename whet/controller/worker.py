# SPDX-License-Identifier: Apache-2.0
"""Workers, one a role and process: the far side of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from whet.devices import HOST


@dataclass(frozen=True)
class Placement:
    """The place of a worker, made by its backend: the first argument of its class."""

    role: str  # of its group: actor, critic, rollout, ...
    rank: int = 0  # of its process, from 0
    world_size: int = 1  # ranks of the role
    process_group: torch.distributed.ProcessGroup | None = None  # the ranks; None where the process is alone
    neighbours: Mapping[str, Worker] = field(default_factory=dict)  # see `Worker`
    address: str = "127.0.0.1"  # under which workers elsewhere reach this machine, for stores and sockets of their own
    device: torch.device = HOST  # that the roles of this process share


class Worker:
    """A rank of a role. Subclasses call `super().__init__(placement)` first and mark what the loop may call with
    `@register`. Arguments are to be read, not written: within one process they are the caller's own objects.

    `neighbours` are the workers of other roles in this process, by role; in `__init__` those that were built before.
    A rollout worker takes the actor's module from there, without a copy.
    """

    def __init__(self, placement: Placement) -> None:
        self.role, self.rank, self.world_size = placement.role, placement.rank, placement.world_size
        self.process_group, self.neighbours = placement.process_group, placement.neighbours
        self.address, self.device = placement.address, placement.device

    @property
    def dp_rank(self) -> int:
        """The number of the shard of a batch that this worker is given; ranks that share a model (tensor parallel)
        report the same."""
        return self.rank

    @property
    def dp_size(self) -> int:
        """Into how many shards a batch is split; the same on every rank."""
        return self.world_size

    @property
    def is_reporting(self) -> bool:
        """True on exactly one of the ranks with the same `dp_rank`: results come from it."""
        return True

    def close(self) -> None:
        """Lets go of what would outlive the worker: files, processes. Called once, in an orderly end only."""


@dataclass(frozen=True)
class WorkerSpec:
    """The recipe for the workers of a role: `cls(placement, *args, **kwargs)` on every rank. Travels by pickle, so the
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
    """A worker's place among the data-parallel ranks, as it reports it."""

    dp_rank: int
    dp_size: int
    is_reporting: bool

    @classmethod
    def of(cls, worker: Worker) -> Layout:
        """The layout of one worker, read once after it was built."""
        return cls(worker.dp_rank, worker.dp_size, worker.is_reporting)
