# SPDX-License-Identifier: Apache-2.0
"""Routes of weights: the sender and the kind of link for each receiver."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from whet.weight_sync.collective import CollectiveInlet, CollectiveOutlet, spans
from whet.weight_sync.link import Inlet, Outlet
from whet.weight_sync.shared_memory import SharedMemoryInlet, SharedMemoryOutlet

Way = Literal["memory", "broadcast"]


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
        outlets["memory"] = SharedMemoryOutlet(len(near), deadline_seconds)
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
