# SPDX-License-Identifier: Apache-2.0
"""Routes of weights: the sender and the kind of link for each receiver; the controller's side of a weight sync."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from whet.controller.worker_group import WorkerGroup
from whet.errors import DeadlineError, LostWorkerError, WeightSyncError
from whet.weight_sync.buckets import Broken, Inlet, LinkClosedError, Outlet
from whet.weight_sync.links import CollectiveInlet, CollectiveOutlet, SharedMemoryInlet, SharedMemoryOutlet, spans

Way = Literal["memory", "broadcast"]
Loss = LostWorkerError | DeadlineError
# Sends a version of the weights to the rollout, and returns their digest; see `BetweenPools`.
WeightSync = Callable[..., str]


@dataclass(frozen=True)
class Site:
    """The machine, address and accelerator of a rank."""

    machine: str  # equal for processes that can share memory
    address: str  # under which other machines reach it
    accelerator: str | None = None  # unique identifier of the rank's device

    @classmethod
    def here(cls, address: str, device: torch.device) -> Site:
        """The site of this process, which computes on `device` and which others reach at `address`."""
        folder = Path(tempfile.gettempdir()).stat()  # containers with separate files cannot share sockets either
        accelerator = str(torch.get_device_module(device).get_device_properties(device).uuid) if spans(device) else None
        return cls(f"{socket.gethostname()} {folder.st_dev} {folder.st_ino}", address, accelerator)


@dataclass(frozen=True)
class Route:
    """The route of the weights to one rank of the rollout; `address` is set once the sender has opened its end."""

    sender: int  # rank
    way: Way
    rank: int  # in the broadcast, where the sender is rank 0
    size: int  # of the broadcast's group
    on_accelerator: bool
    address: str = ""


def plan_routes(senders: Sequence[Site], receivers: Sequence[Site]) -> list[Route]:
    """Chooses a route for each receiver.

    Between distinct accelerators: one broadcast from rank 0. Otherwise through shared memory from the first training
    rank on the receiver's machine; receivers on machines without one get a broadcast from rank 0.
    """
    devices = [senders[0].accelerator, *(receiver.accelerator for receiver in receivers)]
    on_accelerator = None not in devices and len(set(devices)) == len(devices)
    first_on = {sender.machine: rank for rank, sender in reversed(list(enumerate(senders)))}
    is_near = [receiver.machine in first_on and not on_accelerator for receiver in receivers]
    size, routes, rank = 1 + is_near.count(False), list[Route](), 0
    for receiver, near in zip(receivers, is_near, strict=True):
        if near:
            routes.append(Route(first_on[receiver.machine], "memory", 0, 0, False))
        else:
            rank += 1
            routes.append(Route(0, "broadcast", rank, size, on_accelerator))
    return routes


def with_addresses(routes: Sequence[Route], opened: Sequence[dict[Way, str]]) -> list[Route]:
    """The routes with the addresses of the outlets that the training ranks opened."""
    return [replace(route, address=opened[route.sender][route.way]) for route in routes]


def open_outlets(
    routes: Sequence[Route], sender: int, address: str, deadline_seconds: float, device: torch.device
) -> dict[Way, Outlet]:
    """Opens the outlets of a training rank that computes on `device`; receivers of a broadcast connect to `address`."""
    own = [route for route in routes if route.sender == sender]
    near, far = ([route for route in own if route.way == way] for way in ("memory", "broadcast"))
    outlets: dict[Way, Outlet] = {}
    if near:
        outlets["memory"] = SharedMemoryOutlet(len(near), deadline_seconds, spares=True)
    if far:
        where = device if far[0].on_accelerator else None
        outlets["broadcast"] = CollectiveOutlet(len(far), address, deadline_seconds, where)
    return outlets


def open_inlet(route: Route, deadline_seconds: float, device: torch.device) -> Inlet:
    """Opens the inlet of a receiver that computes on `device`."""
    if route.way == "memory":
        return SharedMemoryInlet(route.address, deadline_seconds)
    where = device if route.on_accelerator else None
    return CollectiveInlet(route.address, route.rank, route.size, deadline_seconds, where)


def weight_sync(actor: WorkerGroup, rollout: WorkerGroup, dtype: str, deadline_seconds: float) -> WeightSync:
    """Chooses how weights are sent: `rollout.sync` where each rollout rank has an actor rank in its process, else
    `BetweenPools`. `dtype` is the rollout's."""
    if all(rollout.is_beside_actor()):
        return lambda version, *_: _common(rollout.sync(version), version)
    return BetweenPools(actor, rollout, dtype, deadline_seconds)


class BetweenPools:
    """Sends weights from the ranks of the actor to those of the rollout, which run in other processes.

    Links are opened for the first version and reused until the ranks change. Both sides are called at the same time and
    wait for each other, for one bucket at most half of `deadline_seconds`: so the sender is not late itself where a
    receiver hangs.
    """

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, dtype: str, deadline_seconds: float) -> None:
        self._actor, self._rollout, self._dtype = actor, rollout, dtype
        self._deadline_seconds = deadline_seconds
        self._only_adapter = all(rollout.takes_adapter())
        self._linked: Mapping[int, int] = {}  # ranks that have a link

    def __call__(
        self, version: int, ranks: Mapping[int, int] | None = None, lost: dict[int, Loss] | None = None
    ) -> str:
        """Sends one version to `ranks`, by default all, each with a number that is new when its process is. `lost` gets
        the ranks that are lost while others go on; without it that is an error.

        Raises: WeightSyncError, DeadlineError, WorkerError."""
        ranks = ranks or dict.fromkeys(range(self._rollout.world_size), 0)
        losses = dict[int, Loss]()
        while True:
            left = {rank: number for rank, number in ranks.items() if rank not in losses}
            if left != self._linked:
                self._open(left, losses)
            receivers, self._linked = {rank: (version,) for rank in left if rank not in losses}, {}
            before = len(losses)
            with ThreadPoolExecutor(2) as threads:  # a pool of one process may be this process, where a call blocks
                calls = [
                    threads.submit(self._actor.publish, version, self._dtype, self._only_adapter),
                    threads.submit(self._on, "receive", receivers, losses),
                ]
            errors = [error for call in calls if (error := call.exception()) is not None]
            digests = [digest for call in calls if call.exception() is None for digest in call.result()]
            broken = [each.error for each in digests if isinstance(each, Broken)]
            is_for_others = lost is not None and before < len(losses) < len(ranks)
            if errors or not (broken and is_for_others):  # else a lost rank broke the links of the others
                break
        if errors or broken or lost is None or len(losses) == len(ranks):
            errors += [*losses.values(), *broken]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, LinkClosedError))  # the cause before its effect
        if lost is not None:
            lost.update(losses)
        self._linked = {} if losses else dict(ranks)
        return _common(digests, version)

    def _open(self, ranks: Iterable[int], lost: dict[int, Loss]) -> None:
        """Opens links to ranks, and closes earlier ones; begins again where one is lost meanwhile."""
        left, seconds = None, self._deadline_seconds / 2
        while left is None or len(left) > len(self._on("open_inlet", left, lost)):
            asked = [rank for rank in ranks if rank not in lost]
            sites = self._on("site", dict.fromkeys(asked, ()), lost)
            routes = plan_routes(self._actor.site(), sites)
            routes = with_addresses(routes, self._actor.open_outlets(routes, seconds))
            there = [rank for rank in asked if rank not in lost]
            left = {rank: (route, seconds) for rank, route in zip(there, routes, strict=True)}

    def _on(self, method: str, arguments: Mapping[int, tuple[Any, ...]], lost: dict[int, Loss]) -> list[Any]:
        """Calls ranks at the same time.  Returns their results; `lost` gets those that are lost while others go on."""
        calls = {rank: self._rollout.start_on(rank, method, *each) for rank, each in arguments.items()}
        found = list[Any]()
        for rank, call in calls.items():
            try:
                found.append(call.result())
            except (LostWorkerError, DeadlineError) as error:
                if not call.is_lost:
                    raise
                lost[rank] = error
        return found


def _common(digests: Iterable[str | None], version: int) -> str:
    """The digest of all ranks.  Raises: WeightSyncError where they differ."""
    found = {digest for digest in digests if digest is not None}
    if len(found) != 1:
        shown = ", ".join(sorted(found))
        raise WeightSyncError(f"version {version}: digests", shown, "the same weights, of one digest, on all ranks")
    return found.pop()
